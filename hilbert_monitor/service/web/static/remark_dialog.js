/* The dialog in which somebody writes the note and the tags of a run. */

import { h, say } from "./dom.js";
import { clip } from "./format.js";
import { change, remarksOf } from "./remarks.js";

/** Open the dialog for a run. */
export function editRemarks(run) {
  const { note, tags, archived } = remarksOf(run.id);
  const text = h("textarea", { rows: 5, maxlength: 4000, value: note, "aria-label": "Note" });
  const names = h("input", { type: "text", value: tags.join(", "), "aria-label": "Tags", autocomplete: "off" });
  const box = h("input", { type: "checkbox", checked: archived });
  const trouble = h("p", { class: "refusal", role: "alert" });
  const save = async (event) => {
    event.preventDefault();
    const wanted = names.value.split(",").map((one) => one.trim()).filter(Boolean);
    const changes = {
      note: text.value,
      archived: box.checked,
      tag: wanted.filter((one) => !tags.includes(one)),
      untag: tags.filter((one) => !wanted.includes(one)),
    };
    try {
      await change([run.id], changes);
      dialog.close();
    } catch (error) {
      say(trouble, error.message);
    }
  };
  const dialog = h(
    "dialog",
    { class: "help remark", "aria-label": `Note and tags of ${run.label || run.id}` },
    h("h2", {}, clip(run.label || run.id, 80)),
    h(
      "form",
      { onsubmit: save },
      h("label", {}, "Note", text),
      h("label", {}, "Tags, with commas between them", names),
      h("label", { class: "check" }, box, h("span", {}, "Archived: hidden unless asked for")),
      trouble,
      h(
        "div",
        { class: "ends" },
        h("button", { class: "button", type: "submit" }, "Save"),
        h("button", { class: "tool", type: "button", onclick: () => dialog.close() }, "Cancel"),
      ),
    ),
  );
  dialog.addEventListener("close", () => dialog.remove());
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  document.body.append(dialog);
  dialog.showModal();
  text.focus();
}
