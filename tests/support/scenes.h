/*
 * A small training state whose values depend on run and step alone. Any process can save it, and any other
 * can check what it loads. Also helpers for tests that damage stores: directory trees and leftover files.
 */
#ifndef TESTS_SUPPORT_SCENES_H
#define TESTS_SUPPORT_SCENES_H

#include <stdbool.h>

#include "include/ckptdelta.h"

#define SCENE_RUN "run"

/*
 * The state of (run, step) has a master and its bf16 weights, a moment in two regions, an embedding that
 * never changes and a copy of it, a counter, an empty tensor, a small net that AdamW trains, and two blobs.
 * It takes about 100 bytes a row. One eighth of it changes from one step to the next, so that it is worth a
 * delta. `rows` must be the same for saving and loading.
 */
typedef struct scene {
    const char *run;
    uint64_t step;
    uint64_t rows;
    bool ready; /* with materialized copies of every block, as long chains get them */
    bool base;  /* saved as a base */
} scene;
scene scene_of(uint64_t step); /* SCENE_RUN, 6 rows */

/*
 * Saves the scene. Returns the first status that was not CKD_OK, and never fails the test. info may be NULL.
 */
ckd_status scene_save(ckd_checkpoint *info, ckd_store *store, const scene *s, ckd_error *err);
/* Saves it by two ranks of this process. Each has half of every tensor. */
ckd_status scene_save_ranks(ckd_checkpoint *info, ckd_store *store, const scene *s, ckd_error *err);

/*
 * Gives `save` the part that `rank` of `world` ranks holds: a share of each larger tensor. Rank 0 also has
 * the small tensors.
 */
ckd_status scene_share(ckd_save *save, const scene *s, uint64_t rank, uint64_t world, ckd_error *err);
/* Gives the whole scene to a save that was begun, and commits it. */
ckd_status scene_finish(ckd_checkpoint *info, ckd_save *save, const scene *s, ckd_error *err);

#define SCENE_WRONG ((ckd_status)1000) /* loaded, but not what was saved: this must never happen */
/*
 * Loads all of it and compares. Returns CKD_OK, SCENE_WRONG (err names the tensor), or the first status that
 * was not CKD_OK.
 */
ckd_status scene_load(ckd_store *store, const scene *s, ckd_error *err);
/* The same for a checkpoint given by its id, without asking the catalog for its run and step. */
ckd_status scene_load_id(ckd_store *store, const ckd_id *id, const scene *s, ckd_error *err);

/* Opens DIR/store with one thread, so that file operations come in the same order every time. */
ckd_status scene_open(ckd_store **out, const char *dir, ckd_open_mode mode, ckd_error *err);
/* Creates DIR/store with the steps first ... first + count - 1 of SCENE_RUN. Fails the test on an error. */
void scene_make(const char *dir, uint64_t first, uint64_t count);
/*
 * Creates the same from step 0 on, each step a base. Then sets an automatic policy that keeps the last one;
 * a store never keeps fewer than the newest two.
 */
void scene_make_pruning(const char *dir, uint64_t count, uint64_t undo_s);
/* Moves the steps to the trash. They can be restored for an hour. */
void scene_trash(const char *dir, uint64_t first, uint64_t count);
/* Fails the test unless the steps load correctly and no damage is found. */
void scene_check(ckd_store *store, uint64_t first, uint64_t count);

/* DIR/store/RELATIVE. The string is static; the fourth call from now overwrites it. */
const char *store_path_of(const char *dir, const char *relative);

/* ---- contents of directories ---- */
/*
 * Describes each file and directory below `path` in one line: path, kind, mode, size, content hash, and
 * modification time. Release the result with free.
 */
char *tree_describe(const char *path);
void tree_copy(const char *from, const char *to); /* `to` must not exist; times are not copied */
/*
 * Fails the test if the store has files that its manifests do not name: chunk files, intents, temporary
 * names.
 */
void store_check_clean(const char *dir);
/*
 * The same, but allows a journal of the catalog. After a power cut, a journal without effect may remain until
 * the catalog changes.
 */
void store_check_files(const char *dir);
/* Reads a whole file; the result is malloc'ed. */
unsigned char *read_whole_file(const char *path, size_t *size);
void write_whole_file(const char *path, const void *data, size_t size);

/* Fails the test unless both lists are equal in every field. */
void lists_check_equal(const ckd_checkpoint_list *a, const ckd_checkpoint_list *b);

/* Sanitizers make tests slow. A test that sweeps many points uses this to take every n-th only. */
bool under_sanitizer(void);

#endif
