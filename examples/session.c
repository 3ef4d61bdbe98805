/* A training loop with background saves that resumes from its newest checkpoint. Usage: session STORE STEPS. */
#include <ckptdelta.h>
#include <stdio.h>
#include <stdlib.h>

enum { SIZE = 100000 };
static float weights[SIZE];
static uint64_t position = 1; /* of the data loader */

static void check(ckd_status status, const ckd_error *err) {
    if (status != CKD_OK) {
        fprintf(stderr, "session: %s\n", err->message); /* what happened, where, and what to do */
        exit(1);
    }
}

int main(int argc, char **argv) {
    uint64_t steps = argc > 2 ? strtoull(argv[2], NULL, 10) : 20;
    ckd_save_options save = CKD_SAVE_OPTIONS_INIT;
    save.run = "toy";
    ckd_session_options options = CKD_SESSION_OPTIONS_INIT;
    options.save = &save;
    options.every_steps = 5; /* without this line saves cost training at most 3.5 % of its time */
    options.snapshot = CKD_SNAPSHOT_LAZY;
    ckd_tensor tensor = CKD_TENSOR_INIT;
    tensor.name = "layer.weight";
    tensor.dtype = CKD_F32;
    tensor.ndim = 1;
    tensor.shape = (uint64_t[]){SIZE};
    ckd_error err;
    ckd_session *session;
    check(ckd_session_open(&session, argc > 1 ? argv[1] : "toy-store", &options, &err), &err);
    check(ckd_session_add(session, &tensor, weights, 0, &err), &err);
    check(ckd_session_add_bytes(session, "position", &position, sizeof position, &err), &err);
    ckd_checkpoint from = {.step = 0};
    if (ckd_session_restore(&from, session, CKD_LATEST, &err) != CKD_OK && err.status != CKD_E_NOT_FOUND)
        check(err.status, &err);
    printf("resumes after step %d\n", (int)from.step);

    for (uint64_t step = from.step + 1; step <= steps; step++) {
        position = position * 6364136223846793005u + 1; /* the forward and backward pass */
        ckd_session_fence(session);                     /* waits until the state may be changed */
        for (uint64_t i = 0; i < SIZE; i++)
            weights[i] += (float)((position >> 33) % (i + 2)); /* the optimizer */
        /* Saves when a save is due. The next call reports a failed save; training can continue then. */
        ckd_status status =
            step < steps ? ckd_session_step(session, step, &err) : ckd_session_save(session, step, &err);
        check(status, &err);
    }
    check(ckd_session_close(session, &err), &err); /* waits for running saves */
    double sum = 0;
    for (uint64_t i = 0; i < SIZE; i++)
        sum += weights[i];
    printf("the weights add up to %.0f\n", sum);
    return 0;
}
