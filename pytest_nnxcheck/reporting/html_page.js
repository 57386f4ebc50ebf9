/* Browsers open what a link leads into by themselves; this is for those from before they did. */
function reveal() {
  const found = document.getElementById(location.hash.slice(1));
  for (let at = found; at; at = at.parentElement) if (at.tagName === "DETAILS") at.open = true;
  if (found) found.scrollIntoView({block: "nearest"});
}

/* A page that was not loaded by a secure protocol has no clipboard; a selection can be copied on any. */
async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = document.createElement("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}

/* Buttons to copy commands and programs. */
for (const text of document.querySelectorAll(".command code, .program pre")) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "copy";
  button.textContent = "Copy";
  button.addEventListener("click", async event => {
    event.preventDefault(); /* a program is not unfolded */
    await copy(text.textContent);
    button.textContent = "Copied";
    setTimeout(() => button.textContent = "Copy", 2000);
  });
  (text.tagName === "PRE" ? text.parentElement.firstElementChild : text.parentElement).append(" ", button);
}

/* The order of the tests; `data-share` has the shares in the order of the choices. */
const order = document.getElementById("order");
const tests = [...document.querySelectorAll("[data-share]")];
function sort() {
  const at = order.selectedIndex - 1;
  const share = test => Number(test.dataset.share.split(" ")[at]);
  const sorted = at < 0 ? tests : [...tests].sort((one, other) => share(other) - share(one));
  for (const test of sorted) test.parentElement.append(test);
}
if (order) {
  order.parentElement.hidden = false;
  order.addEventListener("change", sort);
  sort(); /* a page that is loaded again keeps the choice */
}

addEventListener("hashchange", reveal);
reveal();
