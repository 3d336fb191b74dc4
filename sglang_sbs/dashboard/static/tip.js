// The tooltip: shows what is under the pointer, and goes on doing so while that changes.

export class Tip {
  constructor(element) {
    this.element = element;
    this.at = null;
  }

  // describe(x, y): lines about that point of the element, or null
  over(element, describe) {
    element.addEventListener("mousemove", (event) => {
      this.at = { element, describe, x: event.clientX, y: event.clientY };
      this.show();
    });
    element.addEventListener("mouseleave", () => {
      this.at = null;
      this.show();
    });
  }

  // To be called after everything was drawn.
  show() {
    const at = this.at;
    let lines = null;
    if (at) {
      const box = at.element.getBoundingClientRect();
      lines = at.describe(at.x - box.left, at.y - box.top);
    }
    this.element.hidden = !lines;
    if (!lines) return;
    this.element.textContent = lines.join("\n");
    this.element.style.left = Math.max(4, Math.min(at.x + 14, innerWidth - this.element.offsetWidth - 8)) + "px";
    this.element.style.top = Math.max(4, Math.min(at.y + 14, innerHeight - this.element.offsetHeight - 8)) + "px";
  }
}
