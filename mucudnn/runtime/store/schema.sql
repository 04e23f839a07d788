-- Tables of a cache file; files hold these statements as they are written here.

CREATE TABLE layer (
  id INTEGER PRIMARY KEY,
  fingerprint TEXT NOT NULL,
  problem TEXT NOT NULL,
  UNIQUE (fingerprint, problem)
);

CREATE TABLE perf (
  layer INTEGER NOT NULL,
  batch INTEGER NOT NULL,
  algo TEXT NOT NULL,
  math_mode TEXT NOT NULL,
  notes TEXT NOT NULL,
  time_ms REAL,
  workspace INTEGER NOT NULL,
  deterministic INTEGER NOT NULL,
  error TEXT,
  noise_ms REAL NOT NULL,
  samples INTEGER NOT NULL,
  measured_at REAL NOT NULL,
  version TEXT NOT NULL,
  PRIMARY KEY (layer, batch, algo, math_mode),
  CHECK ((time_ms IS NULL) = (error IS NOT NULL))
) WITHOUT ROWID;

CREATE TABLE plan_text (
  layer INTEGER NOT NULL,
  batch INTEGER NOT NULL,
  algo TEXT NOT NULL,
  text TEXT NOT NULL,
  PRIMARY KEY (layer, batch, algo)
) WITHOUT ROWID;

CREATE TABLE race (
  layer INTEGER PRIMARY KEY,
  first_ms REAL NOT NULL,
  second_ms REAL NOT NULL,
  measured_at REAL NOT NULL
);

CREATE TABLE checked (
  id INTEGER PRIMARY KEY,
  since REAL NOT NULL
);

CREATE TABLE verdict (
  layer INTEGER NOT NULL,
  batch INTEGER NOT NULL,
  signature TEXT NOT NULL,
  time_ms REAL NOT NULL,
  measured_at REAL NOT NULL,
  PRIMARY KEY (layer, batch, signature)
) WITHOUT ROWID;

CREATE TABLE entries (
  kind TEXT NOT NULL,
  key TEXT NOT NULL,
  value BLOB NOT NULL,
  used_at REAL NOT NULL,
  PRIMARY KEY (kind, key)
);
