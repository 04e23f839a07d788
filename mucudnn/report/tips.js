// Says what a mark of a picture stands for: to a pointer, a finger, and the arrow keys.
(() => {
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.setAttribute("role", "status");
  tip.hidden = true;
  document.body.append(tip);

  let pointed = null;
  const hide = () => {
    tip.hidden = true;
    pointed?.classList.remove("pointed");
    pointed = null;
  };
  const show = (mark, at) => {
    if (mark !== pointed) {
      hide();
      pointed = mark;
      mark.classList.add("pointed");
      tip.textContent = mark.dataset.says;
      tip.hidden = false;
    }
    const box = mark.getBoundingClientRect();
    const x = (at ?? box.left + box.width / 2) - tip.offsetWidth / 2;
    const widest = document.documentElement.clientWidth - tip.offsetWidth - 8;
    const above = box.top - tip.offsetHeight - 8;
    tip.style.left = `${scrollX + Math.max(8, Math.min(x, widest))}px`;
    tip.style.top = `${scrollY + (above > 8 ? above : box.bottom + 8)}px`;
  };

  for (const title of document.querySelectorAll("svg title")) {
    title.parentNode.dataset.says = title.textContent; // in place of the browser's own
    title.remove();
  }
  const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
  for (const picture of document.querySelectorAll("svg")) {
    const marks = [...picture.querySelectorAll("[data-says]")];
    if (!marks.length) continue;
    picture.tabIndex = 0;
    picture.addEventListener("keydown", (event) => {
      if (event.key === "Escape") hide();
      if (!(event.key in steps)) return;
      event.preventDefault();
      const next = marks.indexOf(pointed) + steps[event.key];
      const mark = marks[(next + marks.length) % marks.length];
      mark.scrollIntoView({ block: "nearest", inline: "nearest" });
      show(mark);
    });
    const point = (event) => {
      const mark = event.target.closest("[data-says]");
      if (mark) show(mark, event.clientX);
      else hide();
    };
    picture.addEventListener("pointermove", point);
    picture.addEventListener("pointerdown", point);
    picture.addEventListener("pointerleave", (event) => {
      if (event.pointerType === "mouse") hide(); // a finger's tip stays until the next
    });
    picture.addEventListener("blur", hide);
  }
})();
