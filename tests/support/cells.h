/*
 * Lossy matrices cut into cells, some rows of some columns, small ones so that it does not take long. In tests of them.
 */
#ifndef TESTS_SUPPORT_CELLS_H
#define TESTS_SUPPORT_CELLS_H

#include "engine/save/save.h"
#include "tests/support/drift.h"

enum { CELLS_ROWS = 192, CELLS_COLUMNS = 160, CELLS_COUNT = CELLS_ROWS * CELLS_COLUMNS };

extern const char *const cells_names[3]; /* of a weight and its moments */
/* Cells of some 20 x 20; others; none. */
extern const save_grid cells_small, cells_other, cells_none;

/* A store in dir/store, and the state that is saved to it next, as run "run". */
typedef struct cells_scene {
    char *dir;
    ckd_store *store;
    drift d;
} cells_scene;
/* Columns differ, too: whoever has another one's steps has other errors. */
drift cells_state(void);
/* A fixture of cmocka: *state is a cells_scene. */
int cells_begin(void **state);
int cells_end(void **state);

ckd_save *cells_save(const cells_scene *f, uint64_t step, ckd_fidelity fidelity, const save_grid *grid);
/* The next state, with a NaN in the weight and an infinity in the first moment, as step `step`. */
void cells_save_next(cells_scene *f, uint64_t step, ckd_fidelity fidelity, const save_grid *grid);
uint64_t cells_shards(const cells_scene *f, uint64_t step, const char *name);

ckd_load *cells_load(const cells_scene *f, uint64_t step);
/* A box of a matrix of f32 is the same as in `whole`, which has so many columns. */
void cells_check_box(ckd_load *load, const char *name, const float *whole, uint64_t columns,
                     const ckd_region *r);
/* The weight and both moments: all layouts give what the whole gives. */
void cells_check_parts(const cells_scene *f, uint64_t step);

typedef struct cells_found {
    size_t blocks, sharing, with_factor; /* of one tensor: all; those that share rows; and a factor */
    size_t links;                        /* that share rows */
    char path[4600];                     /* of the file */
    record side;                         /* one with rows: what it points to is gone */
} cells_found;
/* The tensor's blocks in all files of a step. */
cells_found cells_look(const cells_scene *f, uint64_t step, const char *name);

#endif
