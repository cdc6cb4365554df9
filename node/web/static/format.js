// Numbers for people: the same units as in the terminal.

export function quantity(count, digits = 3) {
  for (const unit of ["", "k", "M", "B"]) {
    if (Math.abs(count) < 1000) return `${Number(count.toPrecision(digits))}${unit}`;
    count /= 1000;
  }
  return `${Number(count.toPrecision(digits))}T`;
}

export function size(bytes) {
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (bytes < 1000) return unit === "B" ? `${Math.round(bytes)} B` : `${bytes.toFixed(1)} ${unit}`;
    bytes /= 1000;
  }
  return `${bytes.toFixed(1)} TB`;
}

export function duration(seconds) {
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${(seconds / 3600).toFixed(1)} h`;
  return `${(seconds / 86400).toFixed(1)} days`;
}

export function ago(seconds) {
  return seconds < 1.5 ? "now" : `${duration(Math.max(0, Math.round(seconds)))} ago`;
}

export function percent(share) {
  return `${Math.round(share * 100)}%`;
}

export function loss(value) {
  return value == null ? "-" : value.toFixed(3);
}

export function clock(seconds) {
  return new Date(seconds * 1000).toLocaleTimeString();
}

export function short(id) {
  return `...${id.slice(-6)}`;
}
