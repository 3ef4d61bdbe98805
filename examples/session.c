/* A training loop that saves in the background and resumes from its newest checkpoint. Usage: session STORE STEPS. */
#include <ckptdelta.h>
#include <err.h>
#include <stdio.h>
#include <stdlib.h>

enum { SIZE = 100000 };
static float weights[SIZE];
static uint64_t position = 1; /* of the data loader */
static ckd_error why;         /* if a call failed: what, where, and what to do */

static void check(ckd_status status) {
    if (status != CKD_OK)
        errx(1, "%s", why.message);
}

int main(int argc, char **argv) {
    uint64_t steps = argc > 2 ? strtoull(argv[2], NULL, 10) : 20;
    ckd_save_options save = {.struct_size = sizeof save, .run = "toy"};
    ckd_session_options options = {.struct_size = sizeof options, .save = &save};
    options.snapshot = CKD_SNAPSHOT_LAZY; /* copies while the next step computes, until the fence */
    options.every_steps = 5; /* without this line saves cost training at most 3.5 % of its time */
    ckd_session *session;
    check(ckd_session_open(&session, argc > 1 ? argv[1] : "toy-store", &options, &why));
    ckd_tensor tensor = {.struct_size = sizeof tensor, .name = "layer.weight", .dtype = CKD_F32, .ndim = 1};
    tensor.shape = (uint64_t[]){SIZE};
    check(ckd_session_add(session, &tensor, weights, 0, &why)); /* once, for all saves and loads */
    check(ckd_session_add_bytes(session, "position", &position, sizeof position, &why));
    ckd_checkpoint from;
    ckd_status status = ckd_session_restore(&from, session, CKD_LATEST, &why);
    check(status == CKD_E_NOT_FOUND ? CKD_OK : status); /* a new run has no checkpoint: from.step is 0 */
    printf("resumes after step %d\n", (int)from.step);
    for (uint64_t step = from.step + 1; step <= steps; step++) {
        position = position * 6364136223846793005u + 1; /* the forward and backward pass */
        ckd_session_fence(session);                     /* waits until the state may be changed */
        for (uint64_t i = 0; i < SIZE; i++)
            weights[i] += (float)((position >> 33) % (i + 2)); /* the optimizer */
        check(ckd_session_step(session, step, &why));          /* saves if a save is due */
    }
    check(ckd_session_close(session, &why)); /* waits for running saves */
    printf("the last weight is %.0f\n", weights[SIZE - 1]);
}
