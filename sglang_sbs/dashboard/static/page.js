// What every part of the page uses: elements, and numbers as people read them. Text of others is set
// as text, never as markup.

export const $ = (id) => document.getElementById(id);

export function text(id, value) {
  const element = $(id);
  if (element.textContent !== value) element.textContent = value;
}

export function make(tag, className, content) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (content !== undefined) element.textContent = content;
  return element;
}

export const count = (value) => value.toLocaleString("en-US");
export const seconds = (value) => (value === undefined || value === null ? "–" : value < 1 ? Math.round(value * 1000) + " ms" : value.toFixed(value < 10 ? 2 : 1) + " s");
export const tokens = (value) => (Math.abs(value) < 1000 ? String(value) : (value / 1000).toFixed(Math.abs(value) < 10000 ? 1 : 0) + "k");
export const several = (number, what) => count(number) + " " + what + (number === 1 ? "" : "s");
export const short = (url) => url.replace(/^https?:\/\//, "");
export const age = (value) => (value === null ? "never" : seconds(value) + " ago");

// How long, for people: 42 s, 7 min, 1 h 5 min.
export function span(value) {
  if (value < 60) return Math.max(0, Math.round(value)) + " s";
  const minutes = Math.round(value / 60);
  return minutes < 60 ? minutes + " min" : Math.floor(minutes / 60) + " h " + (minutes % 60) + " min";
}

// The time of day of a moment of the router's clock, as this frame has it.
export function clock(frame, at) {
  const zero = (frame.time_s === undefined ? Date.now() / 1000 : frame.time_s) - frame.now_s;
  return new Date((zero + at) * 1000).toTimeString().slice(0, 8);
}
