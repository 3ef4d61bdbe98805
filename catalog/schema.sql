-- The catalog of a ckptdelta store: an index of its content, for queries. Inspect it with
-- `sqlite3 -readonly catalog.db`. The view checkpoint_list is for people; the library never reads it. Change nothing by
-- hand. Everything but timings, rank_timings and files.verified_ns comes from the manifests; `ckptdelta rebuild` makes it
-- again. Tensors stand in the chunk files: `ckptdelta show` lists them.
--
-- Conventions: sizes are bytes, lengths are elements, times are nanoseconds since 1970. An id is 16 bytes. `key` is
-- local to this file and meaningless elsewhere. Numbers of the vocabulary are those of ckptdelta.h.
-- NULL means a missing id, or an unknown figure (not a number).
--
-- Before it trusts a file, the library compares these statements word for word with those in the file. A change of a
-- statement must raise user_version. A new user_version must change a statement: with these very statements, a higher
-- number is damage, and the catalog is made again.

PRAGMA application_id = 1667985508; -- 0x636b7064, "ckpd"
PRAGMA user_version = 8;

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
    ('fidelity', 1, 'exact'), ('fidelity', 2, 'near'), ('fidelity', 3, 'coarse');

-- Runs that have at least one checkpoint.
CREATE TABLE runs (
    key INTEGER PRIMARY KEY,
    name TEXT NOT NULL UNIQUE CHECK (length(name) BETWEEN 1 AND 128 AND name NOT GLOB '*[^A-Za-z0-9._~-]*')
) STRICT;

-- One row per checkpoint: the newest generation of its manifest. Every list is in the order of UNIQUE (run, step).
-- `detailed` means nothing any more, and new rows have 0: versions before 8 had tables of tensors. The statement is still
-- theirs, so that their catalogs can be read.
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

-- Durations of a save's stages, on the rank that committed it. A rebuild loses only this table, rank_timings and
-- files.verified_ns.
CREATE TABLE timings (
    checkpoint INTEGER NOT NULL REFERENCES checkpoints (key) ON DELETE CASCADE,
    stage TEXT NOT NULL CHECK (length(CAST(stage AS BLOB)) BETWEEN 1 AND 63),
    ns INTEGER NOT NULL CHECK (ns >= 0),
    bytes INTEGER NOT NULL CHECK (bytes >= 0),
    PRIMARY KEY (checkpoint, stage)
) STRICT, WITHOUT ROWID;

-- When each rank worked on each stage. Versions before 6 lack this table, and those before 7 the table suspects. Versions
-- before 8 have tables of tensors. A writer adds the missing tables to a catalog of version 5 or later and drops the
-- others, so its timings stay.
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
