// What is wrong now, and what was in the last hour: as a strip of time and in words.

import { css, fit } from "./heatmap.js";
import { $, clock, make, several, short, span } from "./page.js";

const HOUR_S = 3600;
const MOST = 100;

export class Alerts {
  constructor(tip) {
    this.past = [];
    this.frame = null;
    this.shown = "";
    tip.over($("past-strip"), (x) => this.at(x));
  }

  draw(frame, past) {
    this.frame = frame;
    this.past = past;
    const look = JSON.stringify([frame.alerts, past]);
    if (look !== this.shown) {
      this.shown = look;
      const now = frame.alerts.slice(0, MOST).map((one) => item(one, one.since_s === undefined ? "" : "since " + clock(frame, one.since_s)));
      $("alert-list").replaceChildren(...(now.length ? now : [make("li", "none", "none")]));
      const over = past.slice(0, MOST).map((one) => item(one, during(frame, one) + (one.times > 1 ? ", " + several(one.times, "time") : "")));
      $("past-list").replaceChildren(...(over.length ? over : [make("li", "none", "none that is over")]));
    }
    this.strip();
  }

  // Every alert of the hour: [from, to, alert]
  spans() {
    const now = this.frame.now_s;
    return [
      ...this.past.map((one) => [one.began_s, one.ended_s, one]),
      ...this.frame.alerts.map((one) => [one.since_s === undefined ? now : one.since_s, now, one]),
    ].filter(([, to]) => to > now - HOUR_S);
  }

  strip() {
    const canvas = $("past-strip");
    const width = canvas.clientWidth;
    const height = 34;
    if (!width) return;
    const context = fit(canvas, width, height);
    context.fillStyle = css("--panel");
    context.fillRect(0, 0, width, height);
    context.fillStyle = css("--none");
    context.fillRect(0, 0, width, height - 14);
    const at = (time) => Math.max(0, ((time - this.frame.now_s) / HOUR_S + 1) * width);
    const spans = this.spans();
    for (const severity of ["warning", "critical"]) {
      context.fillStyle = css(severity === "critical" ? "--bad" : "--warn");
      for (const [from, to, one] of spans) {
        if ((one.severity === "critical") !== (severity === "critical")) continue;
        context.fillRect(at(from), severity === "critical" ? 0 : 5, Math.max(2, at(to) - at(from)), severity === "critical" ? height - 14 : height - 19);
      }
    }
    context.fillStyle = css("--faint");
    context.font = "11px system-ui, sans-serif";
    for (const [share, label] of [[0, "1 h ago"], [0.5, "30 min ago"], [1, "now"]]) {
      const wide = context.measureText(label).width;
      context.fillText(label, Math.min(width - wide, Math.max(0, share * width - wide / 2)), height - 2);
    }
  }

  at(x) {
    if (!this.frame) return null;
    const slack = (2 * HOUR_S) / $("past-strip").clientWidth;
    const time = this.frame.now_s - HOUR_S * (1 - x / $("past-strip").clientWidth);
    const found = this.spans().filter(([from, to]) => from - slack <= time && time <= to + slack);
    return [clock(this.frame, time), ...(found.length ? found.slice(0, 8).map(([, , one]) => words(one)) : ["no alert"])];
  }
}

function during(frame, one) {
  const took = one.ended_s - one.began_s;
  const from = clock(frame, one.began_s);
  return took < 2 ? from + ", a moment" : from + " to " + clock(frame, one.ended_s) + ", " + span(took);
}

const words = (one) => (one.subject ? short(one.subject) + ": " : "") + one.text;

function item(one, when) {
  const line = make("li", one.severity === "critical" ? "critical" : "warning");
  line.append(make("span", "when", when), " " + words(one) + (one.todo ? ": " + one.todo : ""));
  return line;
}
