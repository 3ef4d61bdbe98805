/* A trainer whose state depends only on its step, for tests of sessions. */
#ifndef TESTS_SUPPORT_TRAINERS_H
#define TESTS_SUPPORT_TRAINERS_H

#include <stdbool.h>

#include "include/ckptdelta.h"

#define TRAINER_TENSORS 5
#define TRAINER_RUN     "run"

#define TRAINER_FROZEN 1024

/*
 * `layers` matrices of `rows` x 64 floats, each in its own group. Group 0 has a tensor that never changes, a
 * counter and some bytes.
 */
typedef struct trainer {
    uint64_t rows;
    float *layers[TRAINER_TENSORS];
    float frozen[TRAINER_FROZEN];
    int64_t step;
    unsigned char loader[100];
} trainer;

trainer *trainer_new(uint64_t rows);
void trainer_free(trainer *t);
/* Sets the state to that of a step; trainer_set_layer sets one layer. */
void trainer_set(trainer *t, uint64_t step);
void trainer_set_layer(trainer *t, uint64_t layer, uint64_t step);
/* Overwrites every byte with nonsense. */
void trainer_spoil(trainer *t);
/* Fails the test unless all of the state is that of the step. */
void trainer_check(const trainer *t, uint64_t step);

/* Options of a session in DIR/store for TRAINER_RUN. They are static; the next call overwrites them. */
ckd_session_options session_options(void);
/* Opens a session and registers the trainer. Fails the test on an error. */
ckd_session *session_of(const char *dir, const ckd_session_options *options, trainer *t);
ckd_status session_register(ckd_session *s, trainer *t, ckd_error *err);
/* Fails the test unless status is CKD_OK. */
void must(ckd_status status, const ckd_error *err);
/* One iteration: passes the fence, sets the state to that of the step, and saves. */
ckd_status iterate(ckd_session *s, trainer *t, uint64_t step, ckd_error *err);
/* Iterations first ... last. Fails the test on an error. */
void iterate_through(ckd_session *s, trainer *t, uint64_t first, uint64_t last);
/* A whole launch: saves these steps of a trainer with so many rows in DIR/store. Fails the test on an error. */
void trainer_run(const char *dir, uint64_t rows, uint64_t first, uint64_t last);
/* One iteration whose save should fail. Returns the error of the save, or of the wait for it. */
ckd_status iterate_and_wait(ckd_session *s, trainer *t, uint64_t step, ckd_error *err);
/* The number of checkpoints of a run in DIR/store; one of them. Both fail the test on an error. */
uint64_t count_of(const char *dir, const char *run);
ckd_checkpoint checkpoint_of(const char *dir, const char *run, uint64_t step);
/* Loads the step from the store into another trainer, and checks it. */
void stored_check(const char *dir, const char *run, uint64_t step, uint64_t rows);

#endif
