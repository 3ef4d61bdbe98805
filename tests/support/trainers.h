/* A trainer whose state follows from its step, for tests of sessions. */
#ifndef TESTS_SUPPORT_TRAINERS_H
#define TESTS_SUPPORT_TRAINERS_H

#include <stdbool.h>

#include "include/ckptdelta.h"

#define TRAINER_TENSORS 5
#define TRAINER_RUN     "run"

#define TRAINER_FROZEN 1024

/* `layers` matrices of `rows` x 64 floats in groups of their own; what never changes, a counter and some bytes in group 0. */
typedef struct trainer {
    uint64_t rows;
    float *layers[TRAINER_TENSORS];
    float frozen[TRAINER_FROZEN];
    int64_t step;
    unsigned char loader[100];
} trainer;

trainer *trainer_new(uint64_t rows);
void trainer_free(trainer *t);
/* Makes the state that of the step; of one layer only. */
void trainer_set(trainer *t, uint64_t step);
void trainer_set_layer(trainer *t, uint64_t layer, uint64_t step);
/* Every byte becomes nonsense. */
void trainer_spoil(trainer *t);
/* Is it, all of it, the state of the step? Fails the test unless it is. */
void trainer_check(const trainer *t, uint64_t step);

/* Options of a session in DIR/store for TRAINER_RUN; static, overwritten by the next call. */
ckd_session_options session_options(void);
/* Opens a session and registers the trainer. Fails the test unless it works. */
ckd_session *session_of(const char *dir, const ckd_session_options *options, trainer *t);
ckd_status session_register(ckd_session *s, trainer *t, ckd_error *err);
/* Fails the test unless the call was fine. */
void must(ckd_status status, const ckd_error *err);
/* One iteration: the optimizer makes the state that of the step. */
ckd_status iterate(ckd_session *s, trainer *t, uint64_t step, ckd_error *err);
/* One iteration whose save is to fail: told by its own call already, or by the one that waits. */
ckd_status iterate_and_wait(ckd_session *s, trainer *t, uint64_t step, ckd_error *err);
/* Checkpoints of a run of DIR/store; one of them. Fail the test unless they are to be had. */
uint64_t count_of(const char *dir, const char *run);
ckd_checkpoint checkpoint_of(const char *dir, const char *run, uint64_t step);
/* Loads the step from the store into a trainer of its own, and checks it. */
void stored_check(const char *dir, const char *run, uint64_t step, uint64_t rows);

#endif
