// The stream of frames: fetch instead of EventSource, because only fetch can send the key as a
// header. Owns connecting, parsing, and connecting again. Knows nothing of what a frame means.

const RETRY_MS = 1000;
const SILENT_MS = 12000;

export class Refused extends Error {}

export class Stream {
  // onEvent(kind, frame), onState(text, good), onRefused(text)
  constructor(url, handlers) {
    this.url = url;
    this.handlers = handlers;
    this.key = "";
    this.abort = null;
    this.wanted = false;
  }

  open(key) {
    this.key = key;
    this.wanted = true;
    if (!this.abort) this.run();
  }

  close() {
    this.wanted = false;
    if (this.abort) this.abort.abort();
  }

  async run() {
    while (this.wanted) {
      this.abort = new AbortController();
      try {
        await this.connection(this.abort);
        this.handlers.onState("ended, connecting again", false);
      } catch (error) {
        if (error instanceof Refused) {
          this.wanted = false;
          this.abort = null;
          this.handlers.onRefused(error.message);
          return;
        }
        if (this.wanted) this.handlers.onState("no connection: " + error.message, false);
      }
      if (this.wanted) await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    }
    this.abort = null;
  }

  async connection(abort) {
    const headers = this.key ? { Authorization: "Bearer " + this.key } : {};
    const answer = await fetch(this.url, { headers, signal: abort.signal, cache: "no-store" });
    if (answer.status === 401 || answer.status === 403) {
      throw new Refused(this.key ? "this key is not accepted (" + answer.status + ")" : "");
    }
    if (!answer.ok) throw new Error("the router answers " + answer.status);
    this.handlers.onState("live", true);
    const reader = answer.body.getReader();
    const decoder = new TextDecoder();
    let pieces = "";
    for (;;) {
      const silent = setTimeout(() => abort.abort(), SILENT_MS);
      let part;
      try {
        part = await reader.read();
      } finally {
        clearTimeout(silent);
      }
      if (part.done) return;
      pieces += decoder.decode(part.value, { stream: true });
      const events = pieces.split("\n\n");
      pieces = events.pop();
      for (const event of events) this.dispatch(event);
    }
  }

  dispatch(event) {
    let kind = "message";
    let data = "";
    for (const line of event.split("\n")) {
      if (line.startsWith("event: ")) kind = line.slice(7);
      else if (line.startsWith("data: ")) data += line.slice(6);
    }
    if (data) this.handlers.onEvent(kind, JSON.parse(data));
  }
}
