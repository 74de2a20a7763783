/* The tags and the note of a run, as marks beside its name. */

import { h, renew, tool } from "./dom.js";
import { clip } from "./format.js";
import { editRemarks } from "./remark_dialog.js";
import { offer, onRemarks, remarksOf } from "./remarks.js";

const NOTE = 200;

/** The same for the head of a run's page, with a button to change them. It keeps itself up to date. */
export function liveMarks(run) {
  const element = h("div", { class: "remarks" });
  shown.set(element, run);
  show(element);
  return element;
}

const shown = new Map();

function show(element) {
  const run = shown.get(element);
  const edit = offer.offered ? tool("Note and tags", () => editRemarks(run)) : null;
  renew(element, [remarksOf(run.id), offer.offered], () => [remarkMarks(run.id), edit]);
}

onRemarks(() => {
  for (const element of shown.keys()) {
    if (element.isConnected) show(element);
    else shown.delete(element);
  }
});

/** Tags that lead to the runs that have them, the note, and whether the run is archived. */
export function remarkMarks(id) {
  const { note, tags, archived } = remarksOf(id);
  if (!note && !tags.length && !archived) return null;
  const tag = (text) => h("a", { class: "tag", href: `/runs?q=${encodeURIComponent(tagFilter(text))}` }, text);
  const marks = [archived ? h("span", { class: "tag archived" }, "archived") : null, tags.map(tag)];
  return [
    archived || tags.length ? h("span", { class: "tags" }, marks) : null,
    note ? h("small", { class: "note", title: note.length > NOTE ? note : null }, clip(note, NOTE)) : null,
  ];
}

const tagFilter = (text) => (/\s/.test(text) ? `tag:"${text}"` : `tag:${text}`);
