/* Paths in a store's directory. codec/FORMAT.md, "Store directory", is normative. */
#ifndef ENGINE_PATHS_H
#define ENGINE_PATHS_H

#include <stdbool.h>

#include "base/error.h"
#include "codec/metadata/metadata.h"

#define PATH_ROOM 4096 /* bytes for any path in a store; longer store paths are refused at open */

typedef struct pathname {
    char text[PATH_ROOM];
} pathname;

#define DIR_CHUNKS        "data/c"
#define DIR_MANIFESTS     "data/m"
#define DIR_INTENTS       "data/i"
#define DIR_TOMBSTONES    "data/t"
#define DIR_MATERIALIZED  "data/k"
#define DIR_RANKS         "data/r"
#define DIR_SETTINGS      "data/n"
#define DIR_INCOMING      "data/x"
#define DIR_PARITY        "data/p"
#define DIR_DAMAGED       "data/q"
#define FILE_PARITY_LOCK  "data/p/lock"
#define FILE_IDENTITY     "data/store"
#define FILE_DELETIONS    "data/deletions"
#define FILE_PUBLISH_LOCK "data/lock"
#define FILE_READER_LOCK  "data/readers"
#define FILE_CATALOG      "catalog.db"
#define FILE_NEW_CATALOG  "rebuild.db" /* until it is complete; no longer than FILE_CATALOG, for SQLite */

/* STORE/RELATIVE */
pathname path_in(const char *store, const char *relative);
/* STORE/DIR/NAME */
pathname path_of(const char *store, const char *dir, const char *name);
/* STORE/data/c/HEX.ckd, with `suffix` ("" or ".tmp") appended */
pathname path_chunk(const char *store, const ckd_id *file, const char *suffix);
/* STORE/data/i/HEX */
pathname path_intent(const char *store, const ckd_id *save);
/* STORE/data/m/RUN.STEP.GENERATION */
pathname path_manifest(const char *store, const char *run, uint64_t step, uint32_t generation);
/* STORE/data/t/RUN.STEP.GENERATION */
pathname path_tombstone(const char *store, const char *run, uint64_t step, uint32_t generation);

/* Parses the file name of a manifest or tombstone, from the right. Returns false if it is not such a name. */
typedef struct manifest_name {
    char run[CKD_RUN_MAX + 1];
    uint64_t step;
    uint32_t generation;
} manifest_name;
bool manifest_name_parse(manifest_name *out, const char *name);

/*
 * Parses the name of a setting in data/n: KIND.NAME.GENERATION. NAME is a checkpoint's id (pin), a tag, or a run
 * (policy, parity, rename).
 */
#define POLICY_OF_ALL "-" /* in place of a run */
typedef struct setting_name {
    metadata_kind kind;
    char name[CKD_RUN_MAX + 1];
    uint32_t generation;
} setting_name;
bool setting_name_parse(setting_name *out, const char *name);
const char *setting_word(
    metadata_kind kind); /* KIND: "pin", "tag", "policy", "parity", "rename"; "" for other kinds */
/* STORE/data/n/KIND.NAME.GENERATION */
pathname path_setting(const char *store, const setting_name *name);

/* STORE/data/p/GROUP.ROW.ckp, with `suffix` ("" or ".tmp") appended; the second parses such a name. */
pathname path_parity(const char *store, const ckd_id *group, uint32_t row, const char *suffix);
bool parity_name_parse(ckd_id *group, uint32_t *row, const char *name);
/*
 * STORE/data/p/GROUP.incomplete.tmp, the mark of a group whose files are getting their names or being removed. The
 * second parses such a name.
 */
pathname path_parity_mark(const char *store, const ckd_id *group);
bool parity_mark_parse(ckd_id *group, const char *name);

/* Parses 32 hexadecimal digits at the start of text. */
bool id_parse(ckd_id *out, const char *text);

#endif
