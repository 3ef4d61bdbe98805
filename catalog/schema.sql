-- The catalog of a ckptdelta store: an index of its content, for queries. Inspect it with
-- `sqlite3 -readonly catalog.db`. The views checkpoint_list and tensor_list are for people; the library never reads
-- them. Change nothing by hand. Everything but timings, rank_timings and files.verified_ns comes from the manifests and
-- chunk files; `ckptdelta rebuild` makes it again.
--
-- Conventions: sizes are bytes, lengths are elements, times are nanoseconds since 1970. An id is 16 bytes. `key` is
-- local to this file and meaningless elsewhere. Numbers of the vocabulary (role, dtype, ...) are those of ckptdelta.h.
-- NULL means a missing id, or an unknown figure (not a number).
--
-- Before it trusts a file, the library compares these statements word for word with those in the file. A change of a
-- statement must raise user_version. A new user_version must change a statement: with these very statements, a higher
-- number is damage, and the catalog is made again.

PRAGMA application_id = 1667985508; -- 0x636b7064, "ckpd"
PRAGMA user_version = 7;

-- 'format': version of the tables, '1'. 'store': id of the catalog's store, 32 hexadecimal digits. 'mark' (optional):
-- state of the folders of manifests and tombstones when the catalog agreed with them. 'deletions': the store's deletion
-- mark at that time.
CREATE TABLE meta (
    key TEXT NOT NULL PRIMARY KEY,
    value TEXT NOT NULL
) STRICT, WITHOUT ROWID;
INSERT INTO meta VALUES ('format', '1');

-- Names for numbers, for people and reports.
CREATE TABLE vocabulary (
    what TEXT NOT NULL,
    number INTEGER NOT NULL,
    word TEXT NOT NULL,
    PRIMARY KEY (what, number)
) STRICT, WITHOUT ROWID;
INSERT INTO vocabulary VALUES
    ('kind', 1, 'base'), ('kind', 2, 'delta'), ('kind', 3, 'base'),
    ('fidelity', 1, 'exact'), ('fidelity', 2, 'near'), ('fidelity', 3, 'coarse'),
    ('role', 1, 'weight'), ('role', 2, 'exp_avg'), ('role', 3, 'exp_avg_sq'), ('role', 4, 'master'), ('role', 5, 'other'),
    ('dtype', 1, 'f64'), ('dtype', 2, 'f32'), ('dtype', 3, 'f16'), ('dtype', 4, 'bf16'), ('dtype', 5, 'f8e4m3'),
    ('dtype', 6, 'f8e5m2'), ('dtype', 7, 'i64'), ('dtype', 8, 'i32'), ('dtype', 9, 'i16'), ('dtype', 10, 'i8'),
    ('dtype', 11, 'u64'), ('dtype', 12, 'u32'), ('dtype', 13, 'u16'), ('dtype', 14, 'u8'), ('dtype', 15, 'bool');

-- Runs that have at least one checkpoint.
CREATE TABLE runs (
    key INTEGER PRIMARY KEY,
    name TEXT NOT NULL UNIQUE CHECK (length(name) BETWEEN 1 AND 128 AND name NOT GLOB '*[^A-Za-z0-9._~-]*')
) STRICT;

-- One row per checkpoint: the newest generation of its manifest. Every list is in the order of UNIQUE (run, step).
CREATE TABLE checkpoints (
    key INTEGER PRIMARY KEY,
    id BLOB NOT NULL UNIQUE CHECK (length(id) = 16 AND id <> zeroblob(16)),
    run INTEGER NOT NULL REFERENCES runs (key),
    step INTEGER NOT NULL CHECK (step >= 0),
    parent BLOB CHECK (length(parent) = 16),             -- the checkpoint that this one is a delta on
    resumed_from BLOB CHECK (length(resumed_from) = 16), -- the checkpoint that training was resumed from
    generation INTEGER NOT NULL CHECK (generation BETWEEN 0 AND 4294967295),
    kind INTEGER NOT NULL CHECK (kind BETWEEN 1 AND 3),
    fidelity INTEGER NOT NULL CHECK (fidelity BETWEEN 1 AND 3),
    lossy_resumes INTEGER NOT NULL CHECK (lossy_resumes BETWEEN 0 AND 4294967295),
    depth INTEGER NOT NULL CHECK (depth BETWEEN 0 AND 4294967295),
    world INTEGER NOT NULL CHECK (world BETWEEN 0 AND 4294967295),
    tensors INTEGER NOT NULL CHECK (tensors >= 0),
    raw_bytes INTEGER NOT NULL CHECK (raw_bytes >= 0),
    stored_bytes INTEGER NOT NULL CHECK (stored_bytes >= 0),
    manifest_bytes INTEGER NOT NULL CHECK (manifest_bytes >= 0),
    load_cost REAL,
    created_ns INTEGER NOT NULL CHECK (created_ns >= 0),
    metric REAL,
    metric_name TEXT NOT NULL CHECK (length(metric_name) <= 31),
    detailed INTEGER NOT NULL CHECK (detailed BETWEEN 0 AND 1), -- 0: its tensors stand in its chunk files only, and it has no shards, role_totals and part in tensor_totals here
    UNIQUE (run, step),
    CHECK (kind <> 1 OR parent IS NULL),
    CHECK (kind <> 2 OR parent IS NOT NULL)
) STRICT;

-- Checkpoints whose tensors a report must read from chunk files.
CREATE INDEX undetailed ON checkpoints (run, step) WHERE detailed = 0;

-- The chunk files of a checkpoint, as its manifest names them. Compaction may put several checkpoints into one file.
CREATE TABLE files (
    checkpoint INTEGER NOT NULL REFERENCES checkpoints (key) ON DELETE CASCADE,
    ordinal INTEGER NOT NULL CHECK (ordinal >= 0), -- position in the manifest
    name TEXT NOT NULL CHECK (length(name) BETWEEN 1 AND 63),
    rank INTEGER NOT NULL CHECK (rank BETWEEN 0 AND 4294967295),
    size INTEGER NOT NULL CHECK (size >= 0),
    root BLOB NOT NULL CHECK (length(root) = 16),  -- root hash, as in the file's footer
    verified_ns INTEGER CHECK (verified_ns >= 0),  -- when it was last read through and found right; NULL: not known
    PRIMARY KEY (checkpoint, ordinal)
) STRICT, WITHOUT ROWID;

-- Names stay when the last checkpoint that uses them is removed: the next one will use them again.
CREATE TABLE tensor_names (
    key INTEGER PRIMARY KEY,
    name TEXT NOT NULL UNIQUE CHECK (length(CAST(name AS BLOB)) BETWEEN 1 AND 1023)
) STRICT;

-- One rank's shard of a tensor of a checkpoint, if the checkpoint is detailed. After `ckptdelta rebuild` all are.
CREATE TABLE shards (
    checkpoint INTEGER NOT NULL REFERENCES checkpoints (key) ON DELETE CASCADE,
    tensor INTEGER NOT NULL REFERENCES tensor_names (key),
    shard INTEGER NOT NULL CHECK (shard BETWEEN 0 AND 4294967295),     -- number within the tensor
    ordinal INTEGER NOT NULL CHECK (ordinal BETWEEN 0 AND 4294967295), -- position of the tensor in the order saved
    role INTEGER NOT NULL CHECK (role BETWEEN 1 AND 5),
    dtype INTEGER NOT NULL CHECK (dtype BETWEEN 1 AND 15),
    shape TEXT NOT NULL,  -- of the whole tensor: '[768, 3072]', '[]' for a scalar
    region TEXT NOT NULL, -- 'whole'; 'box [0:384, 0:3072]' from:behind in each dimension; 'flat 1000+500' start+count
    elements INTEGER NOT NULL CHECK (elements >= 0), -- of this shard
    raw_bytes INTEGER NOT NULL CHECK (raw_bytes >= 0),
    stored_bytes INTEGER NOT NULL CHECK (stored_bytes >= 0),
    coding TEXT NOT NULL CHECK (length(CAST(coding AS BLOB)) BETWEEN 1 AND 31),
    depth INTEGER NOT NULL CHECK (depth BETWEEN 0 AND 4294967295),
    rel_l2 REAL,           -- error against what was saved, 0 in `exact`
    max_error REAL,
    value_squares REAL,    -- sum over the values, in lossy checkpoints: the weight of rel_l2
    direction_change REAL, -- of m / (sqrt(v) + eps), relative L2
    nonfinite INTEGER NOT NULL CHECK (nonfinite >= 0),
    PRIMARY KEY (checkpoint, tensor, shard)
) STRICT, WITHOUT ROWID;

-- Sums over shards, made when a checkpoint is added, so that a report need not read all shards.
CREATE TABLE role_totals (
    checkpoint INTEGER NOT NULL REFERENCES checkpoints (key) ON DELETE CASCADE,
    role INTEGER NOT NULL CHECK (role BETWEEN 1 AND 5),
    raw_bytes INTEGER NOT NULL CHECK (raw_bytes >= 0),
    stored_bytes INTEGER NOT NULL CHECK (stored_bytes >= 0),
    elements INTEGER NOT NULL CHECK (elements >= 0),
    PRIMARY KEY (checkpoint, role)
) STRICT, WITHOUT ROWID;

-- The same sums over a run's checkpoints, updated when one is added or removed. They saturate at 2^63 - 1.
CREATE TABLE tensor_totals (
    run INTEGER NOT NULL REFERENCES runs (key) ON DELETE CASCADE,
    tensor INTEGER NOT NULL REFERENCES tensor_names (key),
    role INTEGER NOT NULL CHECK (role BETWEEN 1 AND 5),
    checkpoints INTEGER NOT NULL CHECK (checkpoints >= 0), -- that have it
    elements INTEGER NOT NULL CHECK (elements >= 0),
    raw_bytes INTEGER NOT NULL CHECK (raw_bytes >= 0),
    stored_bytes INTEGER NOT NULL CHECK (stored_bytes >= 0),
    PRIMARY KEY (run, tensor, role)
) STRICT, WITHOUT ROWID;

-- Durations of a save's stages, on the rank that committed it. A rebuild loses only this table, rank_timings and
-- files.verified_ns.
CREATE TABLE timings (
    checkpoint INTEGER NOT NULL REFERENCES checkpoints (key) ON DELETE CASCADE,
    stage TEXT NOT NULL CHECK (length(CAST(stage AS BLOB)) BETWEEN 1 AND 63),
    ns INTEGER NOT NULL CHECK (ns >= 0),
    bytes INTEGER NOT NULL CHECK (bytes >= 0),
    PRIMARY KEY (checkpoint, stage)
) STRICT, WITHOUT ROWID;

-- When each rank worked on each stage. Versions before 6 lack this table, and those before 7 the table suspects. They are
-- added to catalogs of version 5 and 6, so their timings stay.
CREATE TABLE rank_timings (
    checkpoint INTEGER NOT NULL REFERENCES checkpoints (key) ON DELETE CASCADE,
    rank INTEGER NOT NULL CHECK (rank BETWEEN 0 AND 4294967295),
    stage TEXT NOT NULL CHECK (length(CAST(stage AS BLOB)) BETWEEN 1 AND 63),
    begin_ns INTEGER NOT NULL CHECK (begin_ns >= 0),     -- since the first rank of the save began
    end_ns INTEGER NOT NULL CHECK (end_ns >= begin_ns),
    work_ns INTEGER NOT NULL CHECK (work_ns >= 0),       -- of all threads in between
    bytes INTEGER NOT NULL CHECK (bytes >= 0),
    PRIMARY KEY (checkpoint, rank, stage)
) STRICT, WITHOUT ROWID;

-- Checkpoints that are suspect, and why: bits, 1: values of the model or the optimizer became NaN or infinite. Programs that
-- wrote earlier versions of the catalog could not read their manifests.
CREATE TABLE suspects (
    checkpoint INTEGER PRIMARY KEY REFERENCES checkpoints (key) ON DELETE CASCADE,
    reasons INTEGER NOT NULL CHECK (reasons BETWEEN 1 AND 4294967295)
) STRICT;

CREATE VIEW checkpoint_list AS
SELECT r.name AS run, c.step, k.word AS kind, f.word AS fidelity, c.depth, c.world, c.tensors, c.raw_bytes,
       c.stored_bytes, round(1.0 * c.raw_bytes / nullif(c.stored_bytes, 0), 2) AS ratio, c.load_cost,
       datetime(c.created_ns / 1000000000, 'unixepoch') AS created, c.metric_name, c.metric, c.generation,
       lower(hex(c.id)) AS id, lower(hex(c.parent)) AS parent, lower(hex(c.resumed_from)) AS resumed_from
FROM checkpoints c
JOIN runs r ON r.key = c.run
LEFT JOIN vocabulary k ON k.what = 'kind' AND k.number = c.kind
LEFT JOIN vocabulary f ON f.what = 'fidelity' AND f.number = c.fidelity
ORDER BY r.name, c.step;

CREATE VIEW tensor_list AS
SELECT r.name AS run, c.step, n.name AS tensor, s.shard, o.word AS role, d.word AS dtype, s.shape, s.region, s.elements,
       s.raw_bytes, s.stored_bytes, round(8.0 * s.stored_bytes / nullif(s.elements, 0), 3) AS bits_per_element, s.coding,
       s.depth, s.rel_l2, s.max_error, s.direction_change, s.nonfinite
FROM shards s
JOIN checkpoints c ON c.key = s.checkpoint
JOIN runs r ON r.key = c.run
JOIN tensor_names n ON n.key = s.tensor
LEFT JOIN vocabulary o ON o.what = 'role' AND o.number = s.role
LEFT JOIN vocabulary d ON d.what = 'dtype' AND d.number = s.dtype
ORDER BY r.name, c.step, s.ordinal, s.shard;
