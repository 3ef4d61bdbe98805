/*
 * Lossy matrices cut into cells, each some rows of some columns. Cells are small here, so that tests are
 * fast.
 */
#ifndef TESTS_SUPPORT_CELLS_H
#define TESTS_SUPPORT_CELLS_H

#include "engine/save/save.h"
#include "tests/support/drift.h"

enum { CELLS_ROWS = 192, CELLS_COLUMNS = 160, CELLS_COUNT = CELLS_ROWS * CELLS_COLUMNS };

extern const char *const cells_names[3]; /* names of a weight and its moments */
/* Cells of about 20 x 20, other cells, and no cells. */
extern const save_grid cells_small, cells_other, cells_none;

/* A store in dir/store, and the state that is saved next in its run "run". */
typedef struct cells_scene {
    char *dir;
    ckd_store *store;
    drift d;
    bool finite_moments; /* the first moments have no infinity */
} cells_scene;
/* Columns have different scales, so that decoding with the steps of another column gives other errors. */
drift cells_state(void);
/* Setup of a cmocka test; *state is a cells_scene. */
int cells_begin(void **state);
int cells_end(void **state);

ckd_save *cells_save(const cells_scene *f, uint64_t step, ckd_fidelity fidelity, const save_grid *grid);
/*
 * Makes the next state, with a NaN in the weight and an infinity in the first moment, and saves it as step
 * `step`.
 */
void cells_save_next(cells_scene *f, uint64_t step, ckd_fidelity fidelity, const save_grid *grid);
uint64_t cells_shards(const cells_scene *f, uint64_t step, const char *name);

ckd_load *cells_load(const cells_scene *f, uint64_t step);
/* Loads a box of an f32 matrix, and compares it with `whole`, which has `columns` columns. */
void cells_check_box(ckd_load *load, const char *name, const float *whole, uint64_t columns,
                     const ckd_region *r);
/* Loads the weight and both moments in many layouts. All must give the values of the whole tensor. */
void cells_check_parts(const cells_scene *f, uint64_t step);

typedef struct cells_found {
    /* Blocks of one tensor: all of them, those that share rows, and those of these with a factor. */
    size_t blocks, sharing, with_factor;
    size_t links;    /* blocks that refer to shared rows */
    char path[4600]; /* of the file with the side record */
    record side;     /* a side record with rows; its pointers are no longer valid */
} cells_found;
/* Counts the tensor's blocks in all files of a step. */
cells_found cells_look(const cells_scene *f, uint64_t step, const char *name);

#endif
