/* The choice of the runs that are compared: boxes by optimizer. The choice is in the address. */

import { h, optimizerMark, renew, say, stateMark, tool } from "./dom.js";
import { BASE, OURS } from "./numbers.js";
import { isArchived } from "./remarks.js";
import { change, get } from "./state.js";
import { runs } from "./store.js";

/** A list of boxes that opens under the controls. */
export class Selection {
  constructor() {
    this.title = h("summary", {});
    this.boxes = h("div", { class: "choices" });
    this.element = h("details", { class: "selection" }, this.title, this.boxes);
  }

  /** Show the runs of an answer's model. */
  show({ model, aside = [] }) {
    const named = get("runs")?.split(",");
    const takesPart = (run) => run.model === model && (!isArchived(run.id) || named?.includes(run.id));
    this.mine = [...runs.values()].filter(takesPart).sort(inOrder);
    this.chosen = new Set(named ?? this.mine.map((run) => run.id));
    this.aside = aside;
    const [all, shown] = [this.mine.length, this.mine.filter((run) => this.chosen.has(run.id)).length];
    say(this.title, `Runs: ${shown === all ? `all ${all}` : `${shown} of ${all}`}`);
    const state = [this.mine.map((run) => [run.id, run.status, run.label]), [...this.chosen], aside];
    renew(this.boxes, state, () => this.groups(shown === all));
  }

  groups(all) {
    const groups = new Map();
    for (const run of this.mine) groups.set(run.optimizer, [...(groups.get(run.optimizer) ?? []), run]);
    const group = ([name, members]) => {
      const only = tool("Only these", () => this.take(members.map((run) => run.id)));
      return h("fieldset", {}, h("legend", {}, optimizerMark(name), only), members.map((run) => this.box(run)));
    };
    return [[...groups].map(group), tool("All runs", () => change({ runs: null }), { disabled: all })];
  }

  box(run) {
    const onchange = ({ target }) => this.flip(run.id, target);
    return h(
      "label",
      { class: "check" },
      h("input", { type: "checkbox", value: run.id, checked: this.chosen.has(run.id), onchange }),
      h("span", {}, run.label || run.id),
      run.seed === null ? null : h("small", {}, `seed ${run.seed}`),
      stateMark(run.status),
      this.aside.includes(run.id) ? h("small", {}, "in no mean") : null,
    );
  }

  /** Add or remove a run; the last one cannot be removed. */
  flip(id, box) {
    const ids = this.mine.map((run) => run.id).filter((one) => (one === id ? box.checked : this.chosen.has(one)));
    if (!ids.length) box.checked = true;
    this.take(ids);
    this.boxes.querySelector(`[value="${CSS.escape(id)}"]`)?.focus();
  }

  take(ids) {
    if (ids.length) change({ runs: ids.length === this.mine.length ? null : ids.join(",") });
  }
}

/** AdamW and RowNorm first, then by name; within an optimizer by seed. */
function inOrder(a, b) {
  const rank = ({ optimizer }) => [BASE, OURS].indexOf(optimizer) + 1 || 3;
  const seed = (run) => run.seed ?? Number.MAX_VALUE;
  return rank(a) - rank(b) || a.optimizer.localeCompare(b.optimizer) || seed(a) - seed(b) || a.id.localeCompare(b.id);
}
