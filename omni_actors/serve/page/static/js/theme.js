// Sets the theme before the first paint. The choice is kept in localStorage; without one, the system's preference counts.
(() => {
  const chosen = localStorage.getItem("omni_actors.theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
