"use strict";
// A click on a header sorts its table: up, down, and as it was. Missing values, a dash, are last both ways.
const texts = new Intl.Collator(undefined, { numeric: true });
for (const table of document.querySelectorAll("table")) {
  const heads = [...table.tHead.rows[0].cells], original = [...table.tBodies[0].rows];
  heads.forEach((head, column) => {
    const button = document.createElement("button"), numbers = head.style.textAlign === "right";
    button.append(...head.childNodes);
    head.append(button);
    head.ariaSort = "none";
    const value = (row) => {
      const text = row.cells[column].textContent.trim();
      return text === "–" || text === "" ? null : numbers ? parseFloat(text) : text;
    };
    button.addEventListener("click", () => {
      const turn = { none: "ascending", ascending: "descending", descending: "none" }[head.ariaSort];
      heads.forEach((other) => { other.ariaSort = "none"; });
      head.ariaSort = turn;
      const sign = turn === "descending" ? -1 : 1;
      const order = (a, b) => a === null || b === null ? (a === null) - (b === null)
        : sign * (numbers ? a - b : texts.compare(a, b));
      const rows = turn === "none" ? original : original.toSorted((a, b) => order(value(a), value(b)));
      table.tBodies[0].append(...rows);
    });
  });
}
