// The slowest requests, a line each with its cause, and the whole page about one of them.

import { $, clock, count, make, seconds, short } from "./page.js";

const ROWS = 8;

export class Slowest {
  // key(): of the control plane, empty where none is wanted
  constructor(key) {
    this.key = key;
    this.body = $("slowest-rows");
    for (let i = 0; i < ROWS; i += 1) {
      const row = make("tr");
      for (let k = 0; k < 4; k += 1) row.append(make("td"));
      const button = make("button", "why");
      button.type = "button";
      button.addEventListener("click", () => this.open(button.dataset.rid));
      row.append(make("td"));
      row.lastChild.append(button);
      this.body.append(row);
    }
    $("explain-close").addEventListener("click", () => $("explain").close());
  }

  draw(frame) {
    const slowest = frame.slowest || [];
    $("slowest-none").hidden = slowest.length > 0;
    for (let i = 0; i < ROWS; i += 1) {
      const one = slowest[i];
      const cells = one
        ? [clock(frame, one.ended_s), seconds(one.ttft_s), count(one.prompt_tokens), one.prefill ? short(one.prefill) + " rank " + one.prefill_rank : "–", one.why]
        : ["", "", "", "", ""];
      cells.forEach((value, k) => {
        const cell = k < 4 ? this.body.children[i].children[k] : this.body.children[i].lastChild.firstChild;
        if (cell.textContent !== value) cell.textContent = value;
      });
      const button = this.body.children[i].lastChild.firstChild;
      button.hidden = !one;
      button.dataset.rid = one ? one.rid : "";
    }
  }

  async open(rid) {
    $("explain-page").textContent = "asking the router";
    $("explain").showModal();
    const key = this.key();
    const headers = { Accept: "text/plain", ...(key ? { Authorization: "Bearer " + key } : {}) };
    try {
      const answer = await fetch("requests/" + encodeURIComponent(rid), { headers, cache: "no-store" });
      const said = await answer.text();
      $("explain-page").textContent = answer.ok ? said : answer.status === 404 ? "The router does not remember this request any more: it keeps the last few thousand." : "The router answers " + answer.status + ": " + said.slice(0, 300);
    } catch (error) {
      $("explain-page").textContent = "no connection: " + error.message;
    }
  }
}
