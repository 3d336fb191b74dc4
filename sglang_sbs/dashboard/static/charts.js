// The timeline of passes and the line of the queue's length. Owns their drawing; what is in them is
// handed over. Times are seconds of the router's clock.

import { PALETTE, css, fit, shade } from "./heatmap.js";
import { count, seconds } from "./page.js";

export const WINDOW_S = 15;
const KEEP_S = 30;

export class Timeline {
  constructor(canvas, tip) {
    this.canvas = canvas;
    this.passes = new Map();
    this.drawn = null;
    tip.over(canvas, (x, y) => this.describe(x, y));
  }

  clear() {
    this.passes.clear();
  }

  // passes as in a frame: [instance, start, end, gap, waste, tokens]; tokens are null for ranks that
  // had no part in it, as where there is no barrier.
  add(passes, now) {
    for (const [instance, start, end, gap, waste, tokens] of passes) {
      let known = this.passes.get(instance);
      if (!known) this.passes.set(instance, (known = []));
      known.push({ start, end, gap, waste, tokens, looks: null });
    }
    for (const known of this.passes.values()) {
      let old = 0;
      while (old < known.length && known[old].end < now - KEEP_S) old += 1;
      if (old) known.splice(0, old);
    }
  }

  // What each instance did in the window: share busy and share wasted.
  summary(now, instances) {
    let busy = 0;
    let waste = 0;
    let rows = 0;
    for (const instance of instances) {
      const known = this.passes.get(instance.instance) || [];
      if (!known.length) continue;
      rows += instance.barrier ? 1 : instance.c_avail.length;
      for (const pass of known) {
        busy += Math.max(0, pass.end - Math.max(pass.start, now - WINDOW_S));
        if (pass.start > now - WINDOW_S) waste += pass.waste;
      }
    }
    return rows ? { busy: busy / rows / WINDOW_S, waste: waste / rows / WINDOW_S, rows } : null;
  }

  draw(instances, now) {
    const width = this.canvas.parentElement.clientWidth;
    if (!width) return;
    const rows = instances.length;
    const narrow = width < 560;
    const label = narrow ? 0 : 150;
    const above = narrow && rows <= 40 ? 13 : 0;
    const high = (rows <= 8 ? 40 : rows <= 40 ? 16 : 7) + above;
    const height = Math.max(1, rows * high + 16);
    const context = fit(this.canvas, width, height);
    const colours = { panel: css("--panel"), none: css("--none"), faint: css("--faint"), waste: css("--waste"), line: css("--line") };
    context.fillStyle = colours.panel;
    context.fillRect(0, 0, width, height);
    const scale = (width - label) / WINDOW_S;
    this.drawn = { instances, now, high, label, scale };
    const at = (time) => label + (time - now + WINDOW_S) * scale;
    context.font = Math.min(11, high - above + 2) + "px system-ui, sans-serif";
    instances.forEach((instance, row) => {
      const top = row * high + above + 1;
      const room = high - above - 3;
      context.fillStyle = colours.faint;
      if (above || (label && (high > 9 || row % 2 === 0))) {
        const name = instance.instance.replace(/^https?:\/\//, "") + (instance.up ? "" : " (down)");
        context.fillText(name, 0, above ? top - 3 : top + Math.min(room, 11), above ? width : label - 8);
      }
      const stripes = Math.min(instance.c_avail.length, Math.max(1, Math.floor(room / 2)));
      for (const pass of this.passes.get(instance.instance) || []) {
        if (pass.end < now - WINDOW_S) continue;
        if (pass.waste > 0.002) {
          const from = Math.max(label, at(pass.start - pass.waste));
          context.fillStyle = colours.waste;
          context.fillRect(from, top + room / 3, Math.max(1, at(pass.start) - from), room / 3);
        }
        if (!pass.looks || pass.looks.length !== stripes) pass.looks = looks(pass.tokens, instance.chunk, stripes);
        this.bar(context, pass.looks, Math.max(label, at(pass.start)), at(pass.end), top, room, colours);
      }
      for (const [start, tokens] of instance.up ? instance.running : []) {
        context.globalAlpha = 0.55;
        this.bar(context, looks(tokens, instance.chunk, stripes), Math.max(label, at(start)), width, top, room, colours);
        context.globalAlpha = 1;
      }
    });
    context.fillStyle = colours.faint;
    context.font = "11px system-ui, sans-serif";
    for (let ago = WINDOW_S - 5; ago >= 0; ago -= 5) {
      const x = Math.round(at(now - ago));
      context.fillRect(x - 1, 0, 1, height - 12);
      const text = ago ? "-" + ago + " s" : "now";
      context.fillText(text, x - context.measureText(text).width - 3, height - 2);
    }
  }

  // What is under a point: a pass, one that still runs, or the bubble before a pass.
  describe(x, y) {
    const { instances, now, high, label, scale } = this.drawn || { instances: [] };
    const instance = instances[Math.floor(y / high)];
    if (!instance || x < label) return null;
    const at = now - WINDOW_S + (x - label) / scale;
    const slack = 1 / scale;
    const known = this.passes.get(instance.instance) || [];
    const pass = known.find((one) => one.start - slack <= at && at <= one.end + slack);
    const running = instance.up && instance.running.find(([start]) => start <= at);
    if (pass) {
      return [
        instance.instance,
        "a pass of " + seconds(pass.end - pass.start) + ", ended " + seconds(now - pass.end) + " ago",
        ...ranksOf(pass.tokens, instance.chunk),
        pass.gap > 0.001 ? seconds(pass.gap) + " after the one before" + (pass.waste > 0.002 ? "; for " + seconds(pass.waste) + " of that requests waited in the router" : "") : "right after the one before",
      ];
    }
    if (running) return [instance.instance, "a pass that has run for " + seconds(now - running[0]), ...ranksOf(running[1], instance.chunk)];
    const next = known.find((one) => one.start > at && one.start - one.gap <= at);
    const waste = next && next.waste > 0.002 && at >= next.start - next.waste - slack;
    return [instance.instance, waste ? "a bubble of " + seconds(next.waste) + ": no pass ran though requests waited in the router" : "no pass: nothing to do there"];
  }

  // One pass: neighbouring stripes of one colour are one rectangle.
  bar(context, looks, from, to, top, room, colours) {
    const wide = Math.max(1, to - from - 0.5);
    const each = room / looks.length;
    let begin = 0;
    for (let i = 1; i <= looks.length; i += 1) {
      if (i < looks.length && looks[i] === looks[begin]) continue;
      if (looks[begin] !== null) {
        context.fillStyle = looks[begin] < 0 ? colours.none : PALETTE[looks[begin]];
        context.fillRect(from, top + begin * each, wide, (i - begin) * each);
      }
      begin = i;
    }
  }
}

function ranksOf(tokens, chunk) {
  const mine = tokens.filter((value) => value !== null);
  const sum = mine.reduce((all, value) => all + value, 0);
  const full = chunk && mine.length ? ", " + Math.round((100 * sum) / chunk / mine.length) + " % of full chunks" : "";
  const shown = tokens.slice(0, 16).map((value) => (value === null ? "–" : count(value)));
  return [
    count(sum) + " tokens on " + mine.filter(Boolean).length + " of " + mine.length + " DP ranks" + full,
    "per rank: " + shown.join("  ") + (tokens.length > 16 ? " …" : ""),
  ];
}

// A colour number per stripe; -1: no tokens, null: another's pass. Ranks that share a stripe show
// their mean.
function looks(tokens, chunk, stripes) {
  const found = [];
  for (let i = 0; i < stripes; i += 1) {
    const from = Math.floor((i * tokens.length) / stripes);
    const to = Math.max(from + 1, Math.floor(((i + 1) * tokens.length) / stripes));
    const mine = tokens.slice(from, to).filter((value) => value !== null);
    if (!mine.length) {
      found.push(null);
      continue;
    }
    const mean = mine.reduce((sum, value) => sum + value, 0) / mine.length;
    found.push(mean ? shade(chunk ? mean / chunk : 1) : -1);
  }
  return found;
}

export function drawTrail(canvas, trail, now, span) {
  const width = canvas.clientWidth;
  const height = 150;
  if (!width) return;
  const context = fit(canvas, width, height);
  context.fillStyle = css("--panel");
  context.fillRect(0, 0, width, height);
  const most = Math.max(4, ...trail.map((point) => point[1]));
  const line = new Path2D();
  const area = new Path2D();
  area.moveTo(0, height - 12);
  let x = 0;
  trail.forEach(([time, requests], index) => {
    x = ((time - now + span) / span) * width;
    const y = height - 12 - (requests / most) * (height - 24);
    if (index) line.lineTo(x, y);
    else line.moveTo(x, y);
    if (!index) area.lineTo(x, height - 12);
    area.lineTo(x, y);
  });
  area.lineTo(x, height - 12);
  context.fillStyle = css("--none");
  context.fill(area);
  context.strokeStyle = css("--accent");
  context.lineWidth = 1.5;
  context.stroke(line);
  context.fillStyle = css("--faint");
  context.font = "11px system-ui, sans-serif";
  context.fillText(most + " waiting", 2, 10);
  context.fillText("-" + span + " s", 2, height - 1);
  context.fillText("now", width - context.measureText("now").width - 2, height - 1);
}

// Ratios per minute, [minute from now, ratio], for an hour; the line at 1 is no gain.
export function drawRatio(canvas, trail) {
  const width = canvas.clientWidth;
  const height = 44;
  if (!width) return;
  const context = fit(canvas, width, height);
  context.fillStyle = css("--panel");
  context.fillRect(0, 0, width, height);
  const most = Math.max(1.2, ...trail.map((point) => point[1]));
  const y = (ratio) => height - 2 - (ratio / most) * (height - 4);
  context.strokeStyle = css("--line");
  context.beginPath();
  context.moveTo(0, y(1));
  context.lineTo(width, y(1));
  context.stroke();
  context.fillStyle = css("--accent");
  for (const [minute, ratio] of trail) {
    const x = ((minute + 60) / 60) * width;
    context.fillRect(x, y(ratio) - 1, Math.max(2, width / 60 - 1), 3);
  }
  context.fillStyle = css("--faint");
  context.font = "11px system-ui, sans-serif";
  context.fillText("1.0, no gain", 2, y(1) + 10);
  context.fillText("-1 h", 2, height - 2);
  context.fillText("now", width - context.measureText("now").width - 2, height - 2);
}
