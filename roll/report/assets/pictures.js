// Validation pictures: a row for each prompt, a column for each version; the seeds of a row are the same.
function picturesView(grid) {
  const more = [
    grid.versions.length < grid.versions_recorded ? `${grid.versions.length} of ${grid.versions_recorded} validations` : "",
    grid.rows.length < grid.prompts_recorded ? `${grid.rows.length} of ${grid.prompts_recorded} prompts` : "",
  ].filter(Boolean).join(", ");
  const cell = (picture, prompt, version) => h("td", {}, picture ? h("figure", {}, h("img", { src: picture.source, alt: `${prompt}, version ${version}` }), h("figcaption", {}, number(picture.score))) : "");
  return [
    h("p", { class: "quiet" }, `Drawn by each version from the same noise, with the score. ${more ? `Shown: ${more}; all are in samples/.` : ""}`),
    h("div", { class: "pictures" }, table(["prompt", ...grid.versions.map((version) => `version ${version}`)],
      grid.rows.map((row) => h("tr", {}, h("td", { dir: "auto" }, row.prompt), row.pictures.map((picture, index) => cell(picture, row.prompt, grid.versions[index])))))),
  ];
}
