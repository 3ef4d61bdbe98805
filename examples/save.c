/* Saves the state of two steps, then loads half of the newest one. Usage: save STORE. */
#include <ckptdelta.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ROWS = 512, COLUMNS = 256 };
static float weights[ROWS * COLUMNS], half[ROWS / 2 * COLUMNS];

static void check(ckd_status status, const ckd_error *err) {
    if (status != CKD_OK) {
        fprintf(stderr, "save: %s\n", err->message); /* what happened, where, and what to do */
        exit(1);
    }
}

int main(int argc, char **argv) {
    ckd_error err;
    ckd_store *store;
    check(ckd_store_open(&store, argc > 1 ? argv[1] : "toy-store", CKD_OPEN_CREATE, NULL, &err), &err);
    for (uint64_t step = 1; step <= 2; step++) {
        for (uint64_t i = 0; i < ROWS * COLUMNS; i++)
            weights[i] += 1e-3f * (float)((i * 7919 + step) % 101); /* training */
        ckd_save_options options = CKD_SAVE_OPTIONS_INIT;
        options.run = "toy";
        options.step = step;
        ckd_save *save;
        check(ckd_save_begin(&save, store, &options, &err), &err);
        ckd_tensor tensor = CKD_TENSOR_INIT;
        tensor.name = "layer.weight";
        tensor.dtype = CKD_F32;
        tensor.ndim = 2;
        tensor.shape = (uint64_t[]){ROWS, COLUMNS};
        tensor.data = weights; /* you may change it again when the call returns */
        check(ckd_save_tensor(save, &tensor, &err), &err);
        check(ckd_save_commit(NULL, save, &err), &err); /* now it survives a power failure */
    }

    ckd_checkpoint newest;
    check(ckd_store_find(&newest, store, "toy", CKD_LATEST, &err), &err);
    ckd_load *load;
    check(ckd_load_begin(&load, store, &newest.id, &err), &err);
    ckd_load_request request = CKD_LOAD_REQUEST_INIT;
    request.name = "layer.weight";
    request.region =
        (ckd_region){.kind = CKD_REGION_BOX, .offsets = {ROWS / 2, 0}, .lengths = {ROWS / 2, COLUMNS}};
    request.data = half;
    request.size = sizeof half;
    check(ckd_load_tensor(load, &request, &err), &err); /* every value is verified */
    ckd_load_end(load);
    ckd_store_close(store);
    int same = memcmp(half, weights + ROWS / 2 * COLUMNS, sizeof half) == 0;
    printf("step %d: half of it loaded, %s\n", (int)newest.step, same ? "bit for bit" : "but it differs");
    return same ? 0 : 1;
}
