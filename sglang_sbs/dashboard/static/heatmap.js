// A heat map of DP ranks on one canvas: an instance is a labelled block of cells. Owns layout,
// colours, and drawing only what changed. Knows nothing of where the numbers come from.

const STEPS = 24;

// In order of lightness, so that eyes which see colours differently read it too. On a light page pale
// is nothing to do and dark is busy (after ColorBrewer's YlGnBu), on a dark one dark is nothing to do
// and bright is busy (after viridis): idle cells are close to the ground on both.
const STOPS = {
  light: [[238, 242, 205], [161, 218, 180], [65, 182, 196], [38, 116, 184], [44, 56, 156]],
  dark: [[38, 48, 60], [46, 84, 128], [36, 134, 148], [92, 196, 116], [250, 230, 90]],
};

export let PALETTE = [];
let inkFrom = 0;

export function usePalette(theme) {
  const stops = STOPS[theme];
  PALETTE = Array.from({ length: STEPS }, (_, step) => {
    const place = (step / (STEPS - 1)) * (stops.length - 1);
    const from = stops[Math.floor(place)];
    const to = stops[Math.min(stops.length - 1, Math.floor(place) + 1)];
    const part = place - Math.floor(place);
    return "rgb(" + from.map((value, i) => Math.round(value + (to[i] - value) * part)).join(",") + ")";
  });
  inkFrom = theme === "dark" ? -0.62 : 0.55;
}

// Black or white, whichever can be read on a shade.
function inkOn(step) {
  const pale = inkFrom < 0 ? step > -inkFrom * STEPS : step <= inkFrom * STEPS;
  return pale ? "#10151b" : "#fff";
}

export function shade(share) {
  return Math.max(0, Math.min(STEPS - 1, Math.floor(share * STEPS)));
}

export function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// Sizes a canvas for the screen's pixels; returns its context.
export function fit(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  const pixels = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== pixels[0] || canvas.height !== pixels[1]) {
    [canvas.width, canvas.height] = pixels;
    canvas.style.width = width + "px";
    canvas.style.height = height + "px";
  }
  const context = canvas.getContext("2d", { alpha: false });
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return context;
}

export function legend(element) {
  element.style.background = "linear-gradient(90deg," + PALETTE.join(",") + ")";
}

export class HeatMap {
  // describe(instance, rank): the lines of the tip
  constructor(canvas, tip, describe) {
    this.canvas = canvas;
    this.describe = describe;
    this.layout = "";
    this.cells = [];
    this.drawn = [];
    this.instances = [];
    tip.over(canvas, (x, y) => {
      const size = this.size;
      const cell = this.cells.find((c) => x >= c.x && x < c.x + size && y >= c.y && y < c.y + size);
      return cell ? this.describe(this.instances[cell.instance], cell.rank) : null;
    });
  }

  // instances: [{instance, up, cells: [{upper, lower, text, stale, silent, over}]}]; upper, lower:
  // colour numbers of the halves of a cell, without lower of all of it; a line of text for each half
  draw(instances, again) {
    const width = this.canvas.parentElement.clientWidth;
    if (!width) return;
    const layout = width + "|" + instances.map((i) => i.instance + "#" + i.cells.length).join("|");
    this.instances = instances;
    if (layout !== this.layout || again) {
      this.layout = layout;
      this.arrange(instances, width);
    }
    const context = this.context;
    const size = this.size;
    let number = 0;
    for (const instance of instances) {
      for (const cell of instance.cells) {
        const place = this.cells[number];
        const look = [cell.upper, cell.lower, cell.stale, cell.silent, cell.over, instance.up, this.text ? cell.text : ""].join();
        if (this.drawn[number] !== look) {
          this.drawn[number] = look;
          this.paint(context, place, cell, instance.up, size - 1);
        }
        number += 1;
      }
    }
  }

  arrange(instances, width) {
    const ranks = instances.reduce((sum, instance) => sum + instance.cells.length, 0);
    this.size = ranks <= 64 ? 50 : ranks <= 320 ? 20 : 12;
    this.text = this.size > 40;
    const label = this.size > 15 ? 15 : 12;
    const widest = Math.max(1, Math.floor(width / this.size));
    let x = 0;
    let y = 0;
    let row = 0;
    this.cells = [];
    const labels = [];
    instances.forEach((instance, index) => {
      const columns = Math.min(instance.cells.length, widest);
      const lines = Math.ceil(instance.cells.length / Math.max(1, columns));
      const own = Math.max(columns * this.size, this.size > 15 ? 120 : 72);
      if (x && x + own > width) {
        x = 0;
        y += row;
        row = 0;
      }
      labels.push([instance.instance.replace(/^https?:\/\//, ""), x, y + label - 4, own]);
      for (let rank = 0; rank < instance.cells.length; rank += 1) {
        const column = rank % columns;
        this.cells.push({
          instance: index,
          rank,
          x: x + column * this.size,
          y: y + label + Math.floor(rank / columns) * this.size,
        });
      }
      x += own + 12;
      row = Math.max(row, label + lines * this.size + 6);
    });
    this.context = fit(this.canvas, width, Math.max(1, y + row));
    this.colours = { panel: css("--panel"), ink: css("--ink"), faint: css("--faint"), none: css("--none"), bad: css("--bad"), waste: css("--waste") };
    this.context.fillStyle = this.colours.panel;
    this.context.fillRect(0, 0, width, y + row);
    this.context.font = (label - 4) + "px system-ui, sans-serif";
    this.context.fillStyle = this.colours.faint;
    for (const [text, left, base, room] of labels) {
      let shown = text;
      while (shown.length > 4 && this.context.measureText(shown).width > room + 6) shown = shown.slice(1);
      this.context.fillText(shown, left, base);
    }
    this.drawn = [];
  }

  paint(context, place, cell, up, size) {
    const { x, y } = place;
    const half = Math.ceil(size / 2);
    const known = up && !cell.silent;
    context.fillStyle = this.colours.panel;
    context.fillRect(x, y, size + 1, size + 1);
    context.fillStyle = known ? PALETTE[cell.upper] : this.colours.none;
    context.fillRect(x, y, size, size);
    if (known && cell.lower !== undefined) {
      context.fillStyle = PALETTE[cell.lower];
      context.fillRect(x, y + half, size, size - half);
    }
    if (known && cell.over) {
      context.fillStyle = this.colours.waste;
      context.fillRect(x, y + size - 3, size, 3);
    }
    if (!up) this.strike(context, x, y, size);
    if (this.text) {
      context.font = "11px system-ui, sans-serif";
      context.textAlign = "center";
      const lines = up ? cell.text.split("\n") : ["down"];
      const rows = cell.lower === undefined ? [size / 2 - 4, size / 2 + 12] : [half / 2 + 4, half + half / 2 + 3];
      lines.forEach((line, i) => {
        const share = i && cell.lower !== undefined ? cell.lower : cell.upper;
        context.fillStyle = !up ? this.colours.bad : !known ? this.colours.ink : inkOn(share);
        context.fillText(line, x + size / 2, y + (up ? rows[i] : size / 2 + 4), size - 4);
      });
      context.textAlign = "left";
    }
    if (cell.stale && up) {
      context.strokeStyle = this.colours.bad;
      context.lineWidth = 2;
      context.strokeRect(x + 1, y + 1, size - 2, size - 2);
    }
  }

  // A worker that is down: a bar across its cells, clear of the word.
  strike(context, x, y, size) {
    context.strokeStyle = this.colours.bad;
    context.lineWidth = 1;
    context.beginPath();
    for (const level of this.text ? [0.22, 0.82] : [0.5]) {
      context.moveTo(x + 3, y + size * level);
      context.lineTo(x + size - 3, y + size * level);
    }
    context.stroke();
  }
}
