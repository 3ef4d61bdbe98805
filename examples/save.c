/* Saves a tensor after each of two steps, then loads half of the newest one. Usage: save STORE. */
#include <ckptdelta.h>
#include <err.h>
#include <stdio.h>
#include <string.h>

enum { SIZE = 131072, HALF = SIZE / 2 };
static float weights[SIZE], half[HALF];
static ckd_error why; /* if a call failed: what, where, and what to do */

static void check(ckd_status status) {
    if (status != CKD_OK)
        errx(1, "%s", why.message);
}

int main(int argc, char **argv) {
    ckd_store *store; /* a directory that holds any number of runs */
    check(ckd_store_open(&store, argc > 1 ? argv[1] : "toy-store", CKD_OPEN_CREATE, NULL, &why));
    ckd_tensor tensor = {.struct_size = sizeof tensor, .name = "layer.weight", .dtype = CKD_F32, .ndim = 1};
    tensor.shape = (uint64_t[]){SIZE};
    tensor.data = weights;
    for (uint64_t step = 1; step <= 2; step++) {
        weights[HALF + step] += 1; /* training */
        ckd_save *save;
        ckd_save_options options = {.struct_size = sizeof options, .run = "toy", .step = step};
        check(ckd_save_begin(&save, store, &options, &why)); /* step 2 is coded against step 1 */
        check(ckd_save_tensor(save, &tensor, &why)); /* for each tensor, whose data may change from here on */
        check(ckd_save_commit(NULL, save, &why));    /* now the checkpoint survives a power failure */
    }
    ckd_checkpoint newest;
    ckd_load *load;
    check(ckd_store_find(&newest, store, "toy", CKD_LATEST, &why));
    check(ckd_load_begin(&load, store, &newest.id, &why));
    ckd_load_request request = {.struct_size = sizeof request, .name = "layer.weight", .data = half};
    request.region = (ckd_region){.kind = CKD_REGION_BOX, .offsets = {HALF}, .lengths = {HALF}};
    request.size = sizeof half;
    check(ckd_load_tensor(load, &request, &why)); /* reads what that half needs, and verifies it */
    ckd_load_end(load);
    ckd_store_close(store);
    int same = memcmp(half, weights + HALF, sizeof half) == 0;
    printf("step %d: half of it loaded, %s\n", (int)newest.step, same ? "bit for bit" : "but it differs");
}
