/* Does the server honour the condition of a put, also in a race? */
#include "objects/s3/s3.h"

#include <stdio.h>

enum { RACERS = 8, ROUNDS_MAX = 16 };

typedef enum verdict { UNCLEAR, HONOURED, IGNORED } verdict;

typedef struct race {
    const s3_place *p;
    const char *key;
    char marks[RACERS][S3_WRITER_SIZE];
    size_t won, refused;
    ckd_status status; /* of an answer that says neither */
    ckd_error why;
} race;

static ckd_status prepare_racer(void *context, size_t index, uint32_t slot, s3_request *r, ckd_error *err) {
    race *x = context;
    (void)slot;
    ckd_status status = s3_writer_make(x->marks[index], err);
    THEN(status, s3_put_request(r, x->p, x->key, x->marks[index], true, err));
    r->body = x->marks[index];
    r->body_size = S3_WRITER_SIZE - 1;
    r->once = true; /* a second attempt would be refused because of the first one */
    return status;
}

static ckd_status finish_racer(void *context, size_t index, s3_request *r, ckd_error *err) {
    race *x = context;
    (void)index;
    if (s3_succeeded(r) && !r->problem.code[0]) {
        x->won++;
    } else if (r->failure == CURLE_OK && (r->status == 412 || r->status == 409)) {
        x->refused++;
    } else if (s3_passes(r)) {
        x->status = s3_fail(x->p, r, &x->why);
    } else {
        return s3_fail(x->p, r, err);
    }
    return CKD_OK;
}

static ckd_status run_race(race *x, s3_place *p, const char *key, size_t count, const object_call *call,
                           ckd_error *err) {
    s3_batch batch = {count, prepare_racer, finish_racer, x};
    x->p = p;
    x->key = key;
    x->won = x->refused = 0;
    return s3_run(p, &batch, call, err);
}

/*
 * One writer alone, a second one after it, then several at once for a second key. Two that win prove that the condition
 * is ignored. Lost answers prove nothing: the next round has other keys.
 */
static ckd_status run_round(race *x, s3_place *p, const char keys[2][64], verdict *out,
                            const object_call *call, ckd_error *err) {
    *out = UNCLEAR;
    ckd_status status = run_race(x, p, keys[0], 1, call, err);
    if (status != CKD_OK || x->won == 0) {
        return status;
    }
    status = run_race(x, p, keys[0], 1, call, err);
    if (status != CKD_OK || x->refused == 0) {
        *out = x->won > 0 ? IGNORED : UNCLEAR;
        return status;
    }
    status = run_race(x, p, keys[1], RACERS, call, err);
    if (status == CKD_OK && x->won > 1) {
        *out = IGNORED;
    } else if (status == CKD_OK && x->won == 1 && x->refused >= RACERS / 2) {
        *out = HONOURED;
    }
    return status;
}

/* Also after a cancellation, and after the deadline. */
static ckd_status remove_keys(s3_place *p, const char keys[][2][64], uint32_t rounds, ckd_error *err) {
    object_call briefly = {.deadline_ns = clock_monotonic_ns() + UINT64_C(10000000000)};
    const char *names[2 * ROUNDS_MAX];
    for (uint32_t i = 0; i < 2 * rounds; i++) {
        names[i] = keys[i / 2][i % 2];
    }
    return s3_delete(p, names, 2 * (size_t)rounds, &briefly, err);
}

ckd_status s3_probe(void *place, bool *honoured, const object_call *call, ckd_error *err) {
    s3_place *p = place;
    char mark[S3_WRITER_SIZE], keys[ROUNDS_MAX][2][64];
    race x = {.status = CKD_OK};
    verdict found = UNCLEAR;
    uint32_t rounds = 0, max = p->attempts < ROUNDS_MAX ? p->attempts : ROUNDS_MAX;
    ckd_status status = s3_writer_make(mark, err);
    while (status == CKD_OK && found == UNCLEAR && rounds < max) {
        if (rounds > 0) {
            status = object_call_sleep(call, s3_pause_ns(p, rounds, 0), "a probe", err);
        }
        snprintf(keys[rounds][0], sizeof(keys[0][0]), "probe-%s-%u-1", mark, rounds);
        snprintf(keys[rounds][1], sizeof(keys[0][1]), "probe-%s-%u-2", mark, rounds);
        rounds++;
        THEN(status, run_round(&x, p, keys[rounds - 1], &found, call, err));
    }
    ckd_error why = {0};
    ckd_status removed = remove_keys(p, keys, rounds, &why);
    if (status == CKD_OK && found == UNCLEAR) {
        return err_from(err, x.status, &x.why);
    }
    *honoured = found == HONOURED;
    return status != CKD_OK ? status : err_from(err, removed, &why);
}
