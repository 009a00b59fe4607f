"use strict";
/* Load the page again when the site was written again. */
{
  const place = `${document.currentScript.dataset.root}data/written.txt`;
  let known = null;
  setInterval(async () => {
    try {
      const written = await (await fetch(place, { cache: "no-store" })).text();
      if (known !== null && written !== known) location.reload();
      known = written;
    } catch { /* The server has ended, or writes the site just now. */ }
  }, 1000);
}
