/* Browsers open what a link leads into by themselves; this is for those from before they did. */
function reveal() {
  const found = document.getElementById(location.hash.slice(1));
  for (let at = found; at; at = at.parentElement) if (at.tagName === "DETAILS") at.open = true;
  if (found) found.scrollIntoView({block: "nearest"});
}
addEventListener("hashchange", reveal);
reveal();
