// On narrow screens each table row is a card, and each cell shows the name of its column.
export const NARROW = matchMedia("(max-width: 40rem)");

/** Label the cells of all tables below a node with their columns, now and after every change. */
export function nameCells(root) {
  const name = () => {
    for (const table of root.querySelectorAll(".scroll table")) {
      const columns = [...table.querySelectorAll("thead tr:last-child > *")].map((cell) => cell.textContent.trim().replace(/\s*[▲▼↑↓]$/, ""));
      for (const row of table.querySelectorAll("tbody tr")) {
        let at = 0;
        for (const cell of row.cells) {
          const wanted = cell.tagName === "TD" && cell.colSpan === 1 ? columns[at] || "" : "";
          if ((cell.dataset.label || "") !== wanted) cell.dataset.label = wanted;
          at += cell.colSpan;
        }
      }
    }
  };
  let waiting = 0;
  const soon = () => {
    if (NARROW.matches && !waiting) waiting = requestAnimationFrame(() => ((waiting = 0), name()));
  };
  new MutationObserver(soon).observe(root, { childList: true, subtree: true, characterData: true });
  NARROW.addEventListener("change", soon);
  soon();
}
