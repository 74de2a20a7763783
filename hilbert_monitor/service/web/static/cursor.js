/* A cursor for the keyboard: with the arrow keys it moves along a curve of a panel, and from curve to curve. */

import { point, readable } from "./reading.js";
import { zoom } from "./state.js";

const MOVES = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20, Home: -Infinity, End: Infinity };

/** The cursor of one panel. The value under it is shown as a hover, and spoken. */
export class Cursor {
  /**
   * @param {{plot: HTMLElement, figure: any, look: any, group: any, drawn: any}} panel
   * @param {(text: string) => void} speak
   */
  constructor(panel, speak) {
    Object.assign(this, { panel, speak, curve: 0, x: null });
    panel.plot.addEventListener("keydown", (event) => this.press(event));
    panel.plot.addEventListener("blur", () => this.leave());
  }

  press(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (!this.panel.plot.matches(":focus-visible")) return; // after a click on the plot the keys scroll the page
    if (event.key === "Escape" && this.x !== null) this.leave();
    else if (event.key in MOVES) this.move(MOVES[event.key]);
    else if (event.key === "ArrowUp" || event.key === "ArrowDown") this.turn(event.key === "ArrowUp" ? -1 : 1);
    else return;
    event.preventDefault();
  }

  /** Go to another curve, to the value that is nearest. */
  turn(by) {
    const count = readable(this.panel.figure, this.panel.look?.hidden).length;
    if (count) this.curve = (this.curve + by + count) % count;
    this.move(0);
  }

  /** Go so many values further; the first key goes to the last value. */
  move(by) {
    const curves = readable(this.panel.figure, this.panel.look?.hidden);
    if (!curves.length) return;
    this.curve = Math.min(this.curve, curves.length - 1);
    const curve = curves[this.curve];
    const places = shown(curve.trace);
    if (!places.length) return this.speak(`${curve.name}: no value in this range`);
    const at = this.x === null ? places.length - 1 : nearest(places, curve.trace.x, this.x) + by;
    const place = places[Math.max(0, Math.min(places.length - 1, at))];
    this.x = curve.trace.x[place];
    this.hover(curve, place);
    this.speak(point(curve, place, this.panel.figure));
  }

  hover({ index }, place) {
    const { plot } = this.panel;
    if (!plot._fullLayout) return;
    const unified = plot._fullLayout.hovermode === "x unified";
    Plotly.Fx.hover(plot, unified ? { xval: this.x } : [{ curveNumber: index, pointNumber: place }], "xy");
    this.panel.group.hover(this.panel, this.x); // Plotly tells of a pointer alone
  }

  /** Show the hover again that a redraw removed, without speaking. */
  again() {
    if (this.x === null) return;
    const curve = readable(this.panel.figure, this.panel.look?.hidden)[this.curve];
    const places = curve ? shown(curve.trace) : [];
    if (places.length) this.hover(curve, places[nearest(places, curve.trace.x, this.x)]);
  }

  leave() {
    if (this.x === null) return;
    this.x = null;
    if (this.panel.plot._fullLayout) Plotly.Fx.unhover(this.panel.plot); // it has none when the view has ended
    this.panel.group.hover(this.panel, null);
  }
}

/** The places of the values of a trace that are in the visible range. */
function shown({ x, y }) {
  const [first, last] = zoom() ?? [-Infinity, Infinity];
  return y.flatMap((value, i) => (value === null || x[i] < first || x[i] > last ? [] : [i]));
}

function nearest(places, xs, x) {
  let best = 0;
  places.forEach((place, i) => Math.abs(xs[place] - x) < Math.abs(xs[places[best]] - x) && (best = i));
  return best;
}
