/*
 * A small training state whose values follow from run and step alone, so that any process can save it, and any other can
 * say whether what it loads is right; and what tests that break stores look at: directories, leftovers.
 */
#ifndef TESTS_SUPPORT_SCENES_H
#define TESTS_SUPPORT_SCENES_H

#include <stdbool.h>

#include "include/ckptdelta.h"

#define SCENE_RUN "run"

/*
 * The state of (run, step): a master and its bf16 weights, a moment in two regions, an embedding that never changes and a
 * copy of it, a counter, an empty tensor, a small net that AdamW trains, two blobs. About 100 bytes a row; from one step to the next an eighth changes,
 * so that it is worth a delta. `rows` must be the same for saving and loading.
 */
typedef struct scene {
    const char *run;
    uint64_t step;
    uint64_t rows;
    bool ready; /* with copies of every block, as long chains get them */
    bool base;  /* saved as one */
} scene;
scene scene_of(uint64_t step); /* SCENE_RUN, 6 rows */

/* The scene's checkpoint, or the first status that was not CKD_OK. Never fails the test; info may be NULL. */
ckd_status scene_save(ckd_checkpoint *info, ckd_store *store, const scene *s, ckd_error *err);
/* The same by two ranks of this process, each with half of every tensor. */
ckd_status scene_save_ranks(ckd_checkpoint *info, ckd_store *store, const scene *s, ckd_error *err);

/* Gives a save what `rank` of `world` holds: a share of the larger tensors, the small ones with rank 0. */
ckd_status scene_share(ckd_save *save, const scene *s, uint64_t rank, uint64_t world, ckd_error *err);
/* Gives a save that was begun all of the scene, and commits it. */
ckd_status scene_finish(ckd_checkpoint *info, ckd_save *save, const scene *s, ckd_error *err);

#define SCENE_WRONG ((ckd_status)1000) /* loaded, and not what was saved: the one thing that must never be */
/* Loads all of it and compares. CKD_OK, SCENE_WRONG (err names the tensor), or the first status that was not CKD_OK. */
ckd_status scene_load(ckd_store *store, const scene *s, ckd_error *err);
/* The same for a checkpoint by its id, whatever the catalog says of its run and step. */
ckd_status scene_load_id(ckd_store *store, const ckd_id *id, const scene *s, ckd_error *err);

/* Opens DIR/store with one thread, so that its steps come in the same order every time. */
ckd_status scene_open(ckd_store **out, const char *dir, ckd_open_mode mode, ckd_error *err);
/* DIR/store with the steps first ... first + count - 1 of SCENE_RUN. Fails the test unless it works. */
void scene_make(const char *dir, uint64_t first, uint64_t count);
/* The same from step 0 on, each a base; then a policy that keeps the newest, and so the newest two, after each save. */
void scene_make_pruning(const char *dir, uint64_t count, uint64_t undo_s);
/* Makes the catalog of DIR/store anew, with at most so many rows of tensors from now on, as that of a store of very many checkpoints. */
void scene_adopt(const char *dir, size_t rows);
/* Moves the steps to the trash, for an hour. */
void scene_trash(const char *dir, uint64_t first, uint64_t count);
/* Fails the test unless the steps are right, and no damage is found. */
void scene_check(ckd_store *store, uint64_t first, uint64_t count);

/* DIR/store/RELATIVE; static, overwritten by the call after the next three. */
const char *store_path_of(const char *dir, const char *relative);

/* ---- what is in a directory ---- */
/* One line for each file and directory below: path, kind, mode, size, content hash, time of change. Release with free. */
char *tree_describe(const char *path);
void tree_copy(const char *from, const char *to); /* `to` must not exist; times are not copied */
/* Fails the test if the store holds anything that its manifests do not name: chunk files, intents, temporary names. */
void store_check_clean(const char *dir);
/* The same but for the catalog's journal: after a power cut one that says nothing may lie there until the catalog changes. */
void store_check_files(const char *dir);
/* A whole file; malloc'ed. */
unsigned char *read_whole_file(const char *path, size_t *size);
void write_whole_file(const char *path, const void *data, size_t size);

/* Fails the test unless both lists are equal in every field. */
void lists_check_equal(const ckd_checkpoint_list *a, const ckd_checkpoint_list *b);

/* Under a sanitizer, things are slow: tests that sweep many points say so and take every n-th. */
bool under_sanitizer(void);

#endif
