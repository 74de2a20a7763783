/* The tags and the note of a run, as marks beside its name. */

import { h } from "./dom.js";
import { clip } from "./format.js";
import { remarksOf } from "./remarks.js";

const NOTE = 200;

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
