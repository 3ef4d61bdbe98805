/* All statements that the catalog runs on its own tables. */
#include "catalog/db.h"

#define CHECKPOINT_COLUMNS                                                                                \
    "r.name, c.step, c.id, c.parent, c.resumed_from, c.generation, c.kind, c.fidelity, c.lossy_resumes, " \
    "c.depth, c.world, c.tensors, c.raw_bytes, c.stored_bytes, c.load_cost, c.created_ns, c.metric, "     \
    "c.metric_name, ifnull((SELECT s.reasons FROM suspects s WHERE s.checkpoint = c.key), 0) "

#define CHECKPOINT_FIELDS                                                                                     \
    "run, step, id, parent, resumed_from, generation, kind, fidelity, lossy_resumes, depth, world, tensors, " \
    "raw_bytes, stored_bytes, manifest_bytes, load_cost, created_ns, metric, metric_name, detailed"
#define CHECKPOINT_VALUES \
    "(?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16, ?17, ?18, ?19, 0)"

/*
 * CROSS JOIN fixes the loop order: runs by name, then checkpoints by step. Both come from an index, so nothing is
 * sorted. k is the index's entry and c the row itself. If they differ, c is all NULL and reading it fails.
 */
#define TIMINGS                                                                                 \
    "SELECT r.name, k.step, k.created_ns, k.raw_bytes, k.stored_bytes, t.stage, t.ns, t.bytes " \
    "FROM runs r CROSS JOIN checkpoints k ON k.run = r.key "                                    \
    "CROSS JOIN timings t ON t.checkpoint = k.key "
#define RANK_TIMINGS                                                                    \
    "SELECT r.name, k.step, t.rank, t.stage, t.begin_ns, t.end_ns, t.work_ns, t.bytes " \
    "FROM runs r CROSS JOIN checkpoints k ON k.run = r.key "                            \
    "CROSS JOIN rank_timings t ON t.checkpoint = k.key "
#define CHECKPOINTS_BY_RUN                              \
    "runs r CROSS JOIN checkpoints k ON k.run = r.key " \
    "LEFT JOIN checkpoints c ON c.key = k.key AND c.run = k.run AND c.step = k.step "

const statement_text statement_texts[STATEMENT_COUNT] = {
    [S_PAGE_COUNT] = {"PRAGMA page_count", "read the catalog"},
    [S_BEGIN_READ] = {"BEGIN", "read the catalog"},
    [S_BEGIN_WRITE] = {"BEGIN IMMEDIATE", "begin to write the catalog"},
    [S_COMMIT] = {"COMMIT", "commit to the catalog"},
    [S_ROLLBACK] = {"ROLLBACK", "roll the catalog back"},
    [S_SAVEPOINT] = {"SAVEPOINT entry", "write the catalog"},
    [S_RELEASE] = {"RELEASE entry", "write the catalog"},
    [S_ROLLBACK_TO] = {"ROLLBACK TO entry", "roll the catalog back"},

    [S_META_GET] = {"SELECT value FROM meta WHERE key = ?1", "read the catalog's identity"},
    [S_META_PUT] = {"INSERT INTO meta (key, value) VALUES (?1, ?2)", "create the catalog"},

    [S_NOTE_PUT] = {"INSERT OR REPLACE INTO meta (key, value) VALUES (?1, ?2)", "write the catalog"},

    [S_RUN_KEY] = {"SELECT key FROM runs WHERE name = ?1", "look up a run in the catalog"},
    [S_RUN_ADD] = {"INSERT INTO runs (name) VALUES (?1)", "add a run to the catalog"},
    [S_RUN_DROP] =
        {"DELETE FROM runs WHERE key = ?1 AND NOT EXISTS (SELECT 1 FROM checkpoints WHERE run = ?1)",
         "remove a run from the catalog"},
    [S_CHECKPOINT_AT] = {"SELECT c.key, c.generation, c.id, c.run FROM runs r CROSS JOIN checkpoints c "
                         "ON c.run = r.key AND c.step = ?2 WHERE r.name = ?1",
                         "look up a checkpoint in the catalog"},
    [S_CHECKPOINT_KEY] = {"SELECT key FROM checkpoints WHERE id = ?1", "look up a checkpoint in the catalog"},
    [S_CHECKPOINT_ADD] = {"INSERT INTO checkpoints (" CHECKPOINT_FIELDS ") VALUES " CHECKPOINT_VALUES,
                          "add a checkpoint to the catalog"},
    [S_CHECKPOINT_REPLACE] = {"UPDATE checkpoints SET (" CHECKPOINT_FIELDS ") = " CHECKPOINT_VALUES
                              " WHERE key = ?20",
                              "replace a checkpoint in the catalog"},
    [S_CHECKPOINT_MOVE] =
        {"UPDATE checkpoints SET (run, generation, stored_bytes, manifest_bytes) = (?1, ?2, ?3, ?4) WHERE key = ?5",
         "rename a run in the catalog"},
    [S_CHECKPOINT_DROP] = {"DELETE FROM checkpoints WHERE key = ?1", "remove a checkpoint from the catalog"},
    [S_SUSPECT_DROP] = {"DELETE FROM suspects WHERE checkpoint = ?1", "replace a checkpoint in the catalog"},
    [S_SUSPECT_ADD] = {"INSERT INTO suspects (checkpoint, reasons) VALUES (?1, ?2)",
                       "add a checkpoint to the catalog"},
    [S_FILES_DROP] = {"DELETE FROM files WHERE checkpoint = ?1", "replace a checkpoint in the catalog"},
    [S_FILE_ADD] = {"INSERT INTO files (checkpoint, ordinal, name, rank, size, root) "
                    "VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
                    "add a chunk file to the catalog"},
    [S_FILE_VERIFIED] = {"UPDATE files SET verified_ns = ?2 WHERE name = ?1",
                         "note in the catalog that a chunk file was verified"},
    [S_TIMING_PUT] = {"INSERT INTO timings (checkpoint, stage, ns, bytes) VALUES (?1, ?2, ?3, ?4) "
                      "ON CONFLICT (checkpoint, stage) DO UPDATE SET ns = ?3, bytes = ?4",
                      "add a timing to the catalog"},
    [S_RANK_TIMING_PUT] =
        {"INSERT OR REPLACE INTO rank_timings (checkpoint, rank, stage, begin_ns, end_ns, work_ns, bytes) "
         "VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)",
         "add a timing to the catalog"},

    [S_PLACES] =
        {"SELECT r.name, k.step, k.generation FROM runs r CROSS JOIN checkpoints k ON k.run = r.key ORDER BY r.name, k.step",
         "list checkpoints"},
    [S_LIST_ALL] = {"SELECT " CHECKPOINT_COLUMNS "FROM " CHECKPOINTS_BY_RUN "ORDER BY r.name, k.step",
                    "list checkpoints"},
    [S_LIST_RUN] = {"SELECT " CHECKPOINT_COLUMNS "FROM " CHECKPOINTS_BY_RUN
                    "WHERE r.name = ?1 ORDER BY k.step",
                    "list checkpoints"},
    [S_FIND] = {"SELECT " CHECKPOINT_COLUMNS "FROM " CHECKPOINTS_BY_RUN "WHERE r.name = ?1 AND k.step = ?2",
                "look up a checkpoint in the catalog"},
    [S_FIND_ID] =
        {"SELECT " CHECKPOINT_COLUMNS
         "FROM checkpoints k LEFT JOIN checkpoints c ON c.key = k.key AND c.id = k.id LEFT JOIN runs r ON r.key = c.run WHERE k.id = ?1",
         "look up a checkpoint in the catalog"},
    [S_NEWEST] = {"SELECT " CHECKPOINT_COLUMNS "FROM " CHECKPOINTS_BY_RUN
                  "WHERE r.name = ?1 AND k.step <= ?2 ORDER BY k.step DESC LIMIT 1",
                  "look up the newest checkpoint in the catalog"},
    [S_RUNS] =
        {"SELECT name FROM runs r WHERE EXISTS (SELECT 1 FROM checkpoints c WHERE c.run = r.key) ORDER BY name",
         "list runs"},
    [S_RUN_TOTALS] = {"SELECT r.name, c.raw_bytes, c.manifest_bytes FROM runs r CROSS JOIN checkpoints c "
                      "ON c.run = r.key ORDER BY r.name",
                      "add up the runs"},
    [S_TIMINGS] = {TIMINGS "ORDER BY r.name, k.step", "read how long saves took"},
    [S_TIMINGS_RUN] = {TIMINGS "WHERE r.name = ?1 ORDER BY k.step", "read how long saves took"},
    [S_RANK_TIMINGS] = {RANK_TIMINGS "ORDER BY r.name, k.step, t.rank", "read how long saves took"},
    [S_RANK_TIMINGS_RUN] = {RANK_TIMINGS "WHERE r.name = ?1 ORDER BY k.step, t.rank",
                            "read how long saves took"},
    [S_RUN_FILES] = {"SELECT DISTINCT f.name, f.size FROM runs r CROSS JOIN checkpoints c ON c.run = r.key "
                     "CROSS JOIN files f ON f.checkpoint = c.key WHERE r.name = ?1",
                     "add up the chunk files"},
    [S_ALL_FILES] =
        {"SELECT count(*), ifnull(sum(size), 0), (SELECT ifnull(sum(manifest_bytes), 0) FROM checkpoints) "
         "FROM (SELECT DISTINCT name, size FROM files)",
         "add up the chunk files"},
    [S_FILE_STATES] =
        {"SELECT name, max(size), min(ifnull(verified_ns, 0)) FROM files GROUP BY name ORDER BY name",
         "list the chunk files"},
    [S_INTEGRITY] = {"PRAGMA integrity_check(1)", "check the catalog"},
    [S_FOREIGN_KEYS] = {"PRAGMA foreign_key_check", "check the catalog"},
};
