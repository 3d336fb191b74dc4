// The switch to another policy: a dialog that names what will change, and asks once. What the router
// says is set as text, never as markup.

const $ = (id) => document.getElementById(id);

export class PolicySwitch {
  // key(): of the control plane, empty where none is wanted
  constructor(url, key) {
    this.url = url;
    this.key = key;
    this.now = "";
    $("switch").addEventListener("click", () => this.open());
    $("switch-no").addEventListener("click", () => $("switching").close());
    $("switch-yes").addEventListener("click", () => this.change($("switch-to").value));
    $("switch-to").addEventListener("change", () => this.ask());
  }

  async open() {
    $("switch-asked").textContent = "";
    $("switch-failed").textContent = "";
    $("switch-to").replaceChildren();
    $("switch-yes").disabled = true;
    $("switching").showModal();
    await this.showingErrors(async () => {
      const state = await this.call("GET");
      this.now = state.policy;
      const others = state.policies.filter((name) => name !== state.policy);
      $("switch-to").replaceChildren(...others.map((name) => new Option(name)));
      this.ask();
    });
  }

  ask() {
    const to = $("switch-to").value;
    $("switch-asked").textContent = "Switch from " + this.now + " to " + to + "? Requests that wait or run are kept; only the rule changes. It lasts until the router is restarted.";
    $("switch-yes").disabled = !to;
  }

  async change(policy) {
    $("switch-yes").disabled = true;
    await this.showingErrors(async () => {
      await this.call("PUT", { policy });
      $("switching").close();
    });
    $("switch-yes").disabled = false;
  }

  async showingErrors(step) {
    $("switch-failed").textContent = "";
    try {
      await step();
    } catch (error) {
      $("switch-failed").textContent = error.message;
    }
  }

  async call(method, body) {
    const key = this.key();
    const headers = { "Content-Type": "application/json", ...(key ? { Authorization: "Bearer " + key } : {}) };
    const answer = await fetch(this.url, { method, headers, body: body && JSON.stringify(body), cache: "no-store" });
    const said = await answer.text();
    if (answer.ok) return JSON.parse(said);
    let why = said;
    try {
      why = JSON.parse(said).error.message;
    } catch {
      // not the router's own words
    }
    throw new Error("the router answers " + answer.status + ": " + why.slice(0, 300));
  }
}
