"""The contrast of all text that a page shows, computed in the browser as WCAG 2 defines it."""

SCRIPT = """() => {
    const canvas = new OffscreenCanvas(1, 1).getContext("2d", {willReadFrequently: true});
    const parsed = new Map();
    const rgba = (colour) => {
        if (!parsed.has(colour)) {
            canvas.clearRect(0, 0, 1, 1);
            canvas.fillStyle = colour;
            canvas.fillRect(0, 0, 1, 1);
            const [red, green, blue, alpha] = canvas.getImageData(0, 0, 1, 1).data;
            parsed.set(colour, [red, green, blue, alpha / 255]);
        }
        return parsed.get(colour);
    };
    const over = (top, ground, alpha) => top.slice(0, 3).map((part, i) => alpha * part + (1 - alpha) * ground[i]);
    const linear = (part) => (part <= 0.04045 * 255 ? part / 255 / 12.92 : ((part / 255 + 0.055) / 1.055) ** 2.4);
    const luminance = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
    const chain = (element) => (element ? [...chain(element.parentElement), element] : []);
    const found = [];
    const measure = (element, text, look) => {
        const around = chain(element);
        const styles = around.map((one) => getComputedStyle(one));
        if (styles.some((style) => style.visibility === "hidden" || style.clipPath === "inset(50%)")) return;
        const own = rgba(element instanceof SVGElement ? look.fill : look.color);
        let ground = [255, 255, 255], opacity = own[3];
        styles.forEach((style) => {
            const colour = rgba(style.backgroundColor);
            ground = over(colour, ground, colour[3]);
            opacity *= Number(style.opacity);
        });
        const [a, b] = [luminance(over(own, ground, opacity)), luminance(ground)].sort((x, y) => y - x);
        const where = `${element.tagName.toLowerCase()}.${element.getAttribute("class") ?? ""}`;
        found.push({ratio: (a + 0.05) / (b + 0.05), text: text.trim().slice(0, 40), where});
    };
    const seen = (element) => element.checkVisibility({checkVisibilityCSS: true}) && element.getClientRects().length;
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
        const {parentElement: element, data} = walker.currentNode;
        if (!data.trim() || !seen(element) || element.closest("script, noscript, option")) continue;
        measure(element, data, getComputedStyle(element));
    }
    for (const element of document.body.querySelectorAll("*")) {
        if (!seen(element)) continue;
        if (element.placeholder) measure(element, element.placeholder, getComputedStyle(element, "::placeholder"));
        if (element.matches("select")) measure(element, element.value || "select", getComputedStyle(element));
        for (const end of ["::before", "::after"]) {
            const style = getComputedStyle(element, end);
            if (/["'].+["']/.test(style.content)) measure(element, style.content, style);
        }
    }
    return found;
}"""


def contrasts(page):
    """For each visible text of a page: {"ratio", "text", "where"}."""
    return page.evaluate(SCRIPT)
