const page = JSON.parse(document.getElementById("figures").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");
const places = [...document.querySelectorAll(".plot")];
const options = {responsive: true, displaylogo: false, modeBarButtons: [["toImage", "resetScale2d"]]};

function draw() {
  const template = page.themes[dark.matches ? "dark" : "light"];
  places.forEach((place, i) => {
    const {data, layout} = page.figures[i];
    Plotly.react(place, data, {...layout, template}, options);
  });
}

function save(button) {
  const drawing = button.closest("figure").querySelector(".drawing svg");
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([new XMLSerializer().serializeToString(drawing)], {type: "image/svg+xml"}));
  link.download = button.dataset.file;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

document.documentElement.classList.add("live");
draw();
dark.addEventListener("change", draw);
for (const button of document.querySelectorAll(".save")) button.addEventListener("click", () => save(button));
