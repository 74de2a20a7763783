const page = JSON.parse(document.getElementById("figures").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");
const places = [...document.querySelectorAll(".plot")];
const options = {responsive: true, displaylogo: false, modeBarButtons: [["toImage", "resetScale2d"]]};
function draw(theme) {
  const template = page.themes[theme];
  places.forEach((place, i) => {
    const {data, layout} = page.figures[i];
    Plotly.react(place, data, {...layout, template}, options);
  });
}
const now = () => draw(dark.matches ? "dark" : "light");
now();
dark.addEventListener("change", now);
addEventListener("beforeprint", () => draw("light"));
addEventListener("afterprint", now);
