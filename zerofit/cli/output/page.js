for (const table of document.querySelectorAll("table.sorts")) {
  const heads = [...table.tHead.rows[0].cells];
  const key = (row, at) => {
    const text = row.cells[at].dataset.value ?? row.cells[at].textContent.trim();
    return text === "" || isNaN(text) ? text : Number(text);
  };
  const compare = (a, b, sign) => {
    if (a === "" || b === "") return (a === "") - (b === "");
    if (typeof a === typeof b) return sign * (typeof a === "number" ? a - b : a.localeCompare(b));
    return typeof a === "number" ? -1 : 1;
  };
  heads.forEach((head, at) => {
    const button = document.createElement("button");
    button.type = "button";
    button.title = "sort by this column";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const sign = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
      heads.forEach(other => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", sign === 1 ? "ascending" : "descending");
      const rows = [...table.tBodies[0].rows].map(row => [key(row, at), row]);
      rows.sort((a, b) => compare(a[0], b[0], sign));
      table.tBodies[0].append(...rows.map(row => row[1]));
    });
  });
}
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach(part => { part.open = true; }));
