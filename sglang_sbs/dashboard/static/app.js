// The page: takes frames and fills the panels. Everything that comes from elsewhere is set as text,
// never as markup.

import { Alerts } from "./alerts.js";
import { Timeline, WINDOW_S, drawRatio, drawTrail } from "./charts.js";
import { HeatMap, legend, shade, usePalette } from "./heatmap.js";
import { $, age, clock, count, make, seconds, several, short, span, text, tokens } from "./page.js";
import { PolicySwitch } from "./policy.js";
import { Slowest } from "./slowest.js";
import { Stream } from "./stream.js";
import { Tip } from "./tip.js";

const KEY = "sglang-sbs-key";
const THEME = "sglang-sbs-theme";
const STALE_S = 3;
const TRAIL_S = 60;
const HIDDEN_MS = 10000;
const FAR_OFF = 0.25;
// The verdict of a trial holds for so long.
const VERDICT_S = 86400;
// Scales of decode ranks without a known limit: they grow in steps, and never shrink.
const LEAST_RUNNING = 128;
const LEAST_KV = 128 * 1024;

const state = { frame: null, past: [], trail: [], pending: false, redraw: false, paused: false, most: LEAST_RUNNING, fullest: LEAST_KV };
const tip = new Tip($("tip"));
const alerts = new Alerts(tip);
const slowest = new Slowest(() => sessionStorage.getItem(KEY) || "");
const timeline = new Timeline($("timeline-map"), tip);
const prefillMap = new HeatMap($("prefill-map"), tip, (instance, rank) => {
  const one = instance.data;
  return [
    one.instance + "  DP rank " + rank,
    count(one.c_avail[rank]) + " of " + count(one.chunk) + " tokens of the next chunk are free (C_avail)",
    count(one.flight[rank]) + " tokens on their way, " + count(one.queued[rank]) + " queued there",
    several(one.requests[rank], "request") + " not prefilled yet",
    "last report (EndForward) " + age(one.age[rank]),
    (one.up ? "up" : "down") + ", signal: " + one.tier + ", free in " + seconds(one.free_in_s) + (one.barrier ? "" : ", " + one.c_avail.length + " ranks, no barrier"),
  ];
});
const decodeMap = new HeatMap($("decode-map"), tip, (instance, rank) => {
  const one = instance.data;
  return [
    one.instance + "  DP rank " + rank,
    count(one.running[rank]) + " running requests (B)" + (one.max_running ? " of at most " + count(one.max_running) : "") + ", " + count(one.flight[rank]) + " on their way",
    count(one.kv[rank]) + (one.kv_capacity ? " of " + count(one.kv_capacity) : "") + " KV tokens (K)",
    "last report (EndForward) " + age(one.age[rank]),
    one.up ? "up" : "down",
  ];
});

// Frames ---------------------------------------------------------------------------------------

function onEvent(kind, frame) {
  if (kind === "history") {
    timeline.clear();
    state.trail = frame.queue_trail;
    state.past = [];
  } else if (!state.frame) {
    return;
  }
  state.frame = frame;
  timeline.add(frame.passes, frame.now_s);
  if (frame.past) state.past = frame.past;
  state.trail.push([frame.now_s, frame.queue.requests]);
  while (state.trail.length && state.trail[0][0] < frame.now_s - TRAIL_S) state.trail.shift();
  if (!state.pending && !document.hidden) {
    state.pending = true;
    requestAnimationFrame(draw);
  }
}

function draw() {
  state.pending = false;
  const frame = state.frame;
  if (!frame || document.hidden) return;
  const again = state.redraw;
  state.redraw = false;
  $("board").classList.remove("old");
  drawHeader(frame);
  if (frame.well) drawWell(frame.well);
  if (frame.gain) drawGain(frame.gain, verdictOf(frame));
  text("gain-trial", trialLine(frame.trial));
  if (frame.split) drawSplit(frame.split);
  alerts.draw(frame, state.past);
  slowest.draw(frame);
  prefillMap.draw(frame.prefill.map(prefillCells), again);
  drawDecode(frame, again);
  const rows = frame.prefill;
  timeline.draw(rows, frame.now_s);
  const did = timeline.summary(frame.now_s, rows);
  const ran = Boolean(did) && did.busy > 0;
  text("timeline-summary", ran ? Math.round(did.busy * 100) + " % busy, " + (did.waste * 100).toFixed(1) + " % bubbles while requests waited" : "");
  text("timeline-none", ran ? "" : whyNoPass(rows));
  $("timeline-none").hidden = ran;
  $("timeline-map").hidden = rows.length === 0;
  const total = rows.reduce((sum, one) => sum + one.c_avail.length, 0);
  const lone = rows.filter((one) => !one.barrier).length;
  text("prefill-summary", several(rows.length, "instance") + ", " + several(total, "DP rank") + downOf(rows) + (lone ? ", " + lone + " without a barrier" : ""));
  drawQueue(frame);
  drawTtft(frame.ttft);
  tip.show();
  $("board").dataset.frame = frame.now_s;
}

const staleOf = (one) => one.stale_s || STALE_S;

function downOf(instances) {
  const down = instances.filter((one) => !one.up).length;
  return down ? ", " + count(down) + " down" : "";
}

// What is true where no pass is to be seen.
function whyNoPass(rows) {
  const up = rows.filter((one) => one.up);
  if (!rows.length) return "No prefill instance is known.";
  if (!up.length) return "Every prefill instance is down.";
  const silent = up.reduce((sum, one) => sum + one.age.filter((value) => value === null).length, 0);
  if (silent) return "No pass was reported. " + several(silent, "DP rank") + " never sent EndForward: it comes from engines with the plugin.";
  const stale = up.reduce((sum, one) => sum + one.age.filter((value) => value > staleOf(one)).length, 0);
  if (stale) return "No pass in the last " + WINDOW_S + " s, and nothing from " + several(stale, "DP rank") + " for over " + span(Math.min(...up.map(staleOf))) + ".";
  return "Idle: no pass in the last " + WINDOW_S + " s.";
}

function prefillCells(one) {
  return {
    instance: one.instance,
    up: one.up,
    data: one,
    cells: one.c_avail.map((free, rank) => ({
      upper: shade(one.chunk ? (one.chunk - free) / one.chunk : 0),
      over: free < 0,
      text: tokens(free) + " free\n" + (one.age[rank] === null ? "–" : one.age[rank].toFixed(1) + " s ago"),
      stale: one.age[rank] !== null && one.age[rank] > staleOf(one),
      silent: one.age[rank] === null,
    })),
  };
}

function drawDecode(frame, again) {
  const ranks = frame.decode.reduce((sum, one) => sum + one.running.length, 0);
  const most = Math.max(0, ...frame.decode.flatMap((one) => one.running));
  const fullest = Math.max(0, ...frame.decode.flatMap((one) => one.kv));
  while (state.most < most) state.most *= 2;
  while (state.fullest < fullest) state.fullest *= 2;
  const limits = frame.decode.map((one) => Math.min(state.most, one.max_running || state.most));
  const capacities = frame.decode.every((one) => one.kv_capacity);
  text("decode-summary", several(frame.decode.length, "instance") + ", " + several(ranks, "DP rank") + downOf(frame.decode) + (most || fullest ? ", fullest rank: " + count(most) + " running, " + tokens(fullest) + " KV tokens" : frame.decode.some((one) => one.up) ? ", idle" : ""));
  text("decode-most", count(Math.max(0, ...limits)));
  text("decode-fullest", capacities ? "100 % of the KV memory" : tokens(state.fullest));
  const instances = frame.decode.map((one, i) => ({
    instance: one.instance,
    up: one.up,
    data: one,
    cells: one.running.map((running, rank) => ({
      upper: shade(running / Math.max(1, limits[i])),
      lower: shade(one.kv[rank] / Math.max(1, capacities ? one.kv_capacity : state.fullest)),
      text: count(running) + " run\n" + tokens(one.kv[rank]) + " KV",
      stale: one.age[rank] !== null && one.age[rank] > staleOf(one),
      silent: one.age[rank] === null,
    })),
  }));
  decodeMap.draw(instances, again);
}

function balanceOf(balance) {
  return balance ? balance.active_ranks.toFixed(1) + " of " + balance.ranks.toFixed(0) + ", max / mean " + balance.max_over_mean.toFixed(2) : "–";
}

function drawHeader(frame) {
  text("policy", frame.policy + (frame.policy === "sbs" ? ", " + frame.trigger + " trigger" : "") + (frame.alone ? ", without the scheduler process" : "") + (frame.lead ? ", by " + frame.lead.address + " in term " + frame.lead.term + " since " + seconds(frame.lead.for_s) : ""));
  const timing = frame.timing;
  const figures = [
    ["waiting", count(frame.queue.requests)],
    ["in flight", count(frame.queue.in_flight)],
    ["dispatched per second", frame.rates.dispatched_per_s.toFixed(1)],
    ["dispatch interval|I_opt", seconds(timing.interval_s)],
    ["forward time|T_fwd", seconds(timing.mean_forward_s)],
    ["dispatch latency|L_net", seconds(timing.latency_s)],
    ["dispatch lead", seconds(timing.lead_s)],
    ["active DP ranks", balanceOf(frame.balance)],
  ];
  const list = $("figures");
  if (list.childElementCount !== figures.length) {
    list.replaceChildren(...figures.map(([name]) => {
      const pair = make("div");
      const [words, symbol] = name.split("|");
      const term = make("dt", "", words);
      if (symbol) term.append(make("i", "symbol", " (" + symbol + ")"));
      pair.append(term, make("dd"));
      return pair;
    }));
  }
  figures.forEach(([, value], i) => {
    const shown = list.children[i].lastChild;
    if (shown.textContent !== value) shown.textContent = value;
  });
}

const LEVELS = { green: "● All is well:", amber: "▲ Look into this:", red: "● Act now:" };

function drawWell(well) {
  $("well").dataset.level = well.level;
  text("well-level", LEVELS[well.level] || well.level);
  text("well-cause", (well.subject ? short(well.subject) + ": " : "") + well.cause + ".");
  text("well-todo", well.todo ? "→ " + well.todo + "." + (well.more ? " " + several(well.more, "more alert") + " below." : "") : "");
}

const bounds = (one) => " (" + one.low.toFixed(2) + " to " + one.high.toFixed(2) + ")";

// A trial measured what the shadow only estimates. Its verdict holds for a day, and for its policy.
function verdictOf(frame) {
  const trial = frame.trial;
  if (!trial || trial.ratio === null || trial.low === null || trial.high === null) return null;
  const fresh = trial.running || (frame.policy === trial.policy && frame.time_s - trial.ended_at < VERDICT_S);
  return fresh ? trial : null;
}

function trialLine(trial) {
  if (!trial) return "No trial has measured it: sglang-sbs trial round_robin does.";
  const slot = trial.now ? "; slot " + (trial.slot + 1) + " of at most " + trial.slots + " is " + trial[trial.now] + "’s, " + seconds(trial.slot_left_s) + " left" : "";
  return trial.text[0].toUpperCase() + trial.text.slice(1) + slot + (trial.warning ? ". Beware: " + trial.warning : "") + ".";
}

function drawGain(gain, trial) {
  if (trial) {
    text("gain-number", trial.ratio.toFixed(2) + "×");
    text("gain-note", "the mean TTFT of " + trial.baseline + bounds(trial) + ", measured by " + (trial.running ? "the trial that runs" : "a trial") + " over " + several(trial.arms.policy.requests + trial.arms.baseline.requests, "request") + ".");
    drawRatio($("gain-trail"), gain.trail);
    return;
  }
  const headline = gain.baselines[gain.headline];
  const eta = gain.baselines.eta;
  text("gain-number", headline ? headline.ratio.toFixed(2) + "×" : "–");
  text("gain-note", headline
    ? "the mean TTFT of round robin" + bounds(headline) + ", " + gain.trend + (eta ? "; " + eta.ratio.toFixed(2) + "× that of eta" + bounds(eta) : "") + ". An estimate over " + several(gain.requests, "request") + " of " + gain.minutes + " minutes" + (gain.why ? ". Little gain over eta: " + gain.why : "") + "."
    : "The gain is " + (gain.why.startsWith("not known") ? gain.why : "not known: " + gain.why) + ".");
  drawRatio($("gain-trail"), gain.trail);
}

const PARTS = {
  admission: "admission",
  retries: "failed attempts",
  hold: "held by the scheduler",
  way: "way to the engine",
  queue: "queue of the engine",
  pass: "prefill passes",
  engine: "way, queue and passes",
  decode: "KV transfer and first decode step",
};

function drawSplit(split) {
  text("split-summary", split.requests ? several(split.requests, "request") + " of the last " + Math.round(split.window_s / 60) + " minutes" : "no request had a first token yet");
  const whole = split.p99 ? split.p99.ttft_s : 1;
  for (const name of ["p50", "p99"]) {
    const one = split[name] || { ttft_s: 0, parts_s: {} };
    const track = $("split-" + name);
    Object.keys(PARTS).forEach((part, i) => {
      if (!track.children[i]) track.append(make("div", "part " + part));
      const share = (one.parts_s[part] || 0) / Math.max(1e-6, whole);
      const width = (Math.min(1, share) * 100).toFixed(1) + "%";
      if (track.children[i].style.width !== width) track.children[i].style.width = width;
      track.children[i].title = PARTS[part] + ": " + seconds(one.parts_s[part]);
    });
    text("split-" + name + "-ttft", split[name] ? seconds(one.ttft_s) : "–");
  }
  const box = $("split-parts");
  const known = Object.keys(PARTS).filter((part) => split.p50 && (part in split.p50.parts_s || part in split.p99.parts_s));
  const look = known.join();
  if (box.dataset.known !== look) {
    box.dataset.known = look;
    box.replaceChildren(...known.map((part) => {
      const item = make("span", "key");
      item.append(make("i", "swatch part " + part), PARTS[part] + " ", make("b"));
      return item;
    }));
  }
  known.forEach((part, i) => {
    const value = seconds(split.p50.parts_s[part] || 0) + " / " + seconds(split.p99.parts_s[part] || 0);
    const shown = box.children[i].lastChild;
    if (shown.textContent !== value) shown.textContent = value;
  });
}

function bars(id, rows) {
  const box = $(id);
  if (box.childElementCount !== rows.length) {
    box.replaceChildren(...rows.map((row) => {
      const bar = make("div", "bar " + (row.kind || ""));
      const track = make("div", "track");
      track.append(make("div", "tail"), make("div", "fill"));
      bar.append(make("span"), track, make("span"));
      return bar;
    }));
  }
  rows.forEach((row, i) => {
    const [name, track, value] = box.children[i].children;
    box.children[i].classList.toggle("far", Boolean(row.far));
    if (name.textContent !== row.name) name.textContent = row.name;
    if (value.textContent !== row.value) value.textContent = row.value;
    const widths = [(row.tail || 0) * 100, row.fill * 100];
    widths.forEach((width, part) => {
      const wanted = width.toFixed(1) + "%";
      if (track.children[part].style.width !== wanted) track.children[part].style.width = wanted;
    });
  });
}

function drawQueue(frame) {
  const queue = frame.queue;
  drawTrail($("queue-trail"), state.trail, frame.now_s, TRAIL_S);
  const most = "at most " + count(frame.limits.queue_requests);
  text("queue-now", (queue.requests ? count(queue.requests) + " of " + most + " requests wait with " + count(queue.tokens) + " tokens, the first for " + seconds(queue.oldest_wait_s) : "Nothing waits, of " + most + " requests") + (queue.throttled ? "; flow control refuses new ones" : "") + ".");
  const { high = 0, normal = 0, low = 0 } = queue.classes || {};
  text("queue-classes", high || low || queue.tenants > 1 ? "By priority: " + count(high) + " high, " + count(normal) + " normal, " + count(low) + " low" + (queue.tenants > 1 ? "; of " + count(queue.tenants) + " tenants" : "") : "");
  const hold = frame.hold;
  const tallest = Math.max(1, ...hold.counts);
  $("hold").hidden = !hold.requests;
  bars("hold", hold.counts.map((value, i) => ({
    name: i < hold.bounds_s.length ? "up to " + seconds(hold.bounds_s[i]) : "longer",
    fill: value / tallest,
    value: count(value),
  })));
  text("hold-now", hold.requests ? "Held in the last minute: p50 " + seconds(hold.p50) + ", p95 " + seconds(hold.p95) + ", longest " + seconds(hold.max) : "Nothing was dispatched in the last minute.");
  const rows = queue.oldest.map(([rid, size, waits]) => {
    const row = make("tr");
    row.append(make("td", "", rid), make("td", "", count(size)), make("td", "", seconds(waits)));
    return row;
  });
  $("oldest").tBodies[0].replaceChildren(...rows);
  $("oldest").hidden = rows.length === 0;
}

function drawTtft(ttft) {
  const names = [
    ["measured", "measured", "here, measured"],
    ["modelled", "modelled", "here, by the same model"],
    ["eta", "estimate", "immediate, eta"],
    ["least_tokens", "estimate", "immediate, least tokens"],
    ["round_robin", "estimate", "immediate, round robin"],
  ];
  const figures = ttft.figures;
  const far = Boolean(figures.measured) && Math.abs(deviationOf(figures)) > FAR_OFF;
  const most = Math.max(0.001, ...Object.values(figures).map((one) => one.p95));
  $("ttft-bars").hidden = !figures.measured;
  bars("ttft-bars", names.map(([key, kind, name]) => {
    const one = figures[key];
    return one
      ? { name, kind, far: far && key !== "measured", fill: one.p50 / most, tail: one.p95 / most, value: "p50 " + seconds(one.p50) + ", p95 " + seconds(one.p95) }
      : { name, kind, fill: 0, value: "–" };
  }));
  const behind = Object.entries(ttft.unfinished).filter(([, value]) => value > 0).map(([key, value]) => key.replace("_", " ") + " " + count(value));
  text("ttft-note", (figures.measured ? "Until prefill's answer, " : "Nothing to compare: ") + (figures.measured ? several(ttft.requests, "request") + " of" : "no request was answered in") + (ttft.stopped_s ? " the minute that ended " + seconds(ttft.stopped_s) + " ago. With this many requests one minute in three is followed. " : " the last minute. ") + "The figures for immediate dispatch are an estimate: the same requests in a model of these instances with the forward times learned here"
    + (figures.measured ? "; for what was really done that model is " + deviation(figures) : "") + "."
    + (behind.length ? " Unfinished in the model: " + behind.join(", ") + "." : ""));
}

function deviationOf(figures) {
  return figures.modelled.mean / Math.max(1e-6, figures.measured.mean) - 1;
}

function deviation(figures) {
  const off = deviationOf(figures);
  const far = Math.abs(off) > FAR_OFF ? " off: too much to compare with, hence grey" : " off";
  return (off < 0 ? "−" : "+") + Math.abs(off * 100).toFixed(0) + " %" + far;
}

// Old figures must not look like an answer.
function lost(what) {
  const frame = state.frame;
  if (!frame || state.paused) return;
  $("board").classList.add("old");
  drawWell({ level: "red", subject: "", cause: "this page gets nothing from the router (" + what + "); below is how it was at " + clock(frame, frame.now_s), todo: "see whether the router runs, and the network to it", more: 0 });
}

// The key, the theme, and whether the page is visible -----------------------------------------------

const stream = new Stream("dashboard/events", {
  onEvent,
  onState(what, good) {
    if (!state.paused) text("connection", what);
    $("connection").className = "tag " + (good ? "good" : "bad");
    if (!good) lost(what);
    if (good) {
      $("login").hidden = true;
      $("board").hidden = false;
      $("forget").hidden = !sessionStorage.getItem(KEY);
      $("switch").hidden = false;
    }
  },
  onRefused(why) {
    sessionStorage.removeItem(KEY);
    text("connection", "wants a key");
    $("connection").className = "tag bad";
    $("board").hidden = true;
    $("login").hidden = false;
    $("refused").textContent = why;
    $("forget").hidden = true;
    $("switch").hidden = true;
    $("key").focus();
  },
});

$("login").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, $("key").value);
  $("key").value = "";
  stream.open(sessionStorage.getItem(KEY));
});

$("forget").addEventListener("click", () => {
  sessionStorage.removeItem(KEY);
  location.reload();
});

new PolicySwitch("policy", () => sessionStorage.getItem(KEY) || "");

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  document.documentElement.style.colorScheme = theme;
  usePalette(theme);
  for (const id of ["prefill-scale", "decode-scale", "kv-scale", "timeline-scale"]) legend($(id));
  state.redraw = true;
  if (state.paused) draw();
}

// While it is paused nothing comes: to go on is to begin anew with a history.
$("pause").addEventListener("click", () => {
  state.paused = !state.paused;
  text("pause", state.paused ? "resume" : "pause");
  if (state.paused) {
    stream.close();
    text("connection", "paused at " + new Date().toTimeString().slice(0, 8));
    $("connection").className = "tag bad";
  } else {
    text("connection", "connecting");
    stream.open(sessionStorage.getItem(KEY) || "");
  }
});

$("theme").addEventListener("click", () => {
  const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  localStorage.setItem(THEME, theme);
  setTheme(theme);
});

let leaving = 0;

document.addEventListener("visibilitychange", () => {
  clearTimeout(leaving);
  if (document.hidden) {
    leaving = setTimeout(() => stream.close(), HIDDEN_MS);
  } else if (!state.paused) {
    stream.open(sessionStorage.getItem(KEY) || "");
  }
});

setTheme(localStorage.getItem(THEME) || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
text("timeline-window", WINDOW_S + " s");
stream.open(sessionStorage.getItem(KEY) || "");
