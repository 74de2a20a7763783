/* Acknowledging alerts: the button on each, who has done it, and the name that is put under it. */

import { fill, h, say, tool } from "./dom.js";
import { ageMark, clip } from "./format.js";
import { acknowledge, acknowledgement, offer, onRemarks } from "./remarks.js";

const NAME = "hilbert-monitor name";
const marks = new Map();

/** A part of an alert's card: a button, or who has acknowledged the alert. It keeps itself up to date. */
export function acknowledgementMark(run, alert) {
  const element = h("div", { class: "acknowledgement" });
  marks.set(element, { run, alert });
  show(element);
  return element;
}

function show(element) {
  const { run, alert } = marks.get(element);
  const sign = acknowledgement(run, alert);
  const state = JSON.stringify([sign, offer.offered]);
  if (element.dataset.state === state) return;
  element.dataset.state = state;
  element.toggleAttribute("data-acknowledged", Boolean(sign));
  const held = element.contains(document.activeElement);
  const trouble = h("span", { class: "refusal", role: "alert" });
  const send = (undo) => acknowledge(run, [alert], { by: ownName(), undo }).catch((error) => say(trouble, error.message));
  const button = (label, undo) => (offer.offered ? tool(label, () => send(undo)) : null);
  const by = sign?.by ? ` by ${clip(sign.by, 80)}` : "";
  const said = sign ? h("span", {}, `acknowledged${by} `, ageMark(sign.at)) : null;
  fill(element, said, sign ? button("Undo", true) : button("Acknowledge", false), trouble);
  if (held) element.querySelector("button")?.focus();
}

/** The field for the name that is put under acknowledgements. The browser remembers it. */
export function nameField() {
  const keep = ({ target }) => {
    try {
      localStorage.setItem(NAME, target.value.trim());
    } catch {
      // no storage: it holds while the page is open
    }
    name = target.value.trim();
  };
  return h("input", { type: "text", value: ownName(), maxlength: 80, placeholder: "your name", oninput: keep });
}

let name = null;

function ownName() {
  if (name !== null) return name;
  try {
    return localStorage.getItem(NAME) ?? "";
  } catch {
    return "";
  }
}

/** Acknowledge alerts of any runs. */
export async function acknowledgeAll(alerts) {
  const byRun = new Map();
  for (const alert of alerts) byRun.set(alert.run, [...(byRun.get(alert.run) ?? []), alert]);
  for (const [run, own] of byRun) await acknowledge(run, own, { by: ownName() });
}

onRemarks(() => {
  for (const element of marks.keys()) {
    if (element.isConnected) show(element);
    else marks.delete(element);
  }
});
