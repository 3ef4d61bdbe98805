/*
 * A rank of a training, for tests of agents of several nodes. Usage: rank_trainer STORE RANK WORLD GROUP STEPS [EVERY
 * [TIMEOUT]]. STEPS is the last step, or +N: so many after the restored one. TIMEOUT: for how many seconds ranks wait for
 * each other. The state of a step is the same for any number of ranks: each has rows of a weight, elements of its moment,
 * and a copy of a bias.
 */
#include <ckptdelta.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { ROWS = 240, COLUMNS = 256, ELEMENTS = ROWS * COLUMNS };
static float weight[ELEMENTS], moment[ELEMENTS], bias[COLUMNS];
static uint64_t position = 1; /* of the data loader */

static void check(ckd_status status, const ckd_error *err) {
    if (status != CKD_OK) {
        fprintf(stderr, "rank_trainer: %s\n", err->message);
        exit(1);
    }
}

static void add(ckd_session *s, ckd_tensor t, float *data) {
    ckd_error err;
    t.struct_size = sizeof t;
    t.dtype = CKD_F32;
    check(ckd_session_add(s, &t, data, 0, &err), &err);
}

static void add_all(ckd_session *s, uint64_t first, uint64_t rows) {
    uint64_t shape[] = {ROWS, COLUMNS};
    ckd_tensor w = {.name = "layer.weight", .ndim = 2, .shape = shape};
    ckd_tensor m = {.name = "layer.moment", .ndim = 2, .shape = shape};
    ckd_tensor b = {.name = "layer.bias", .ndim = 1, .shape = shape + 1};
    w.region = (ckd_region){.kind = CKD_REGION_BOX, .offsets = {first, 0}, .lengths = {rows, COLUMNS}};
    m.region = (ckd_region){.kind = CKD_REGION_FLAT, .start = first * COLUMNS, .count = rows * COLUMNS};
    add(s, w, weight);
    add(s, m, moment);
    add(s, b, bias);
    ckd_error err;
    check(ckd_session_add_bytes(s, "position", &position, sizeof position, &err), &err);
}

static void train(uint64_t first, uint64_t rows) {
    position = position * 6364136223846793005u + 1;
    for (uint64_t i = 0; i < rows * COLUMNS; i++) {
        float gradient = (float)((position >> 33) % (first * COLUMNS + i + 2)) * 1e-6f;
        moment[i] = moment[i] * 0.9f + gradient;
        weight[i] -= moment[i] * 1e-3f;
    }
    for (uint64_t i = 0; i < COLUMNS; i++) {
        bias[i] += (float)((position >> 40) % (i + 3));
    }
}

int main(int argc, char **argv) {
    if (argc < 6) {
        fprintf(stderr, "usage: rank_trainer STORE RANK WORLD GROUP STEPS [EVERY [TIMEOUT]]\n");
        return 2;
    }
    ckd_ranks_options ranks = CKD_RANKS_OPTIONS_INIT;
    ranks.rank = (uint32_t)atoi(argv[2]);
    ranks.world = (uint32_t)atoi(argv[3]);
    ranks.group = argv[4];
    ranks.timeout_ms = argc > 7 ? (uint32_t)atoi(argv[7]) * 1000 : 60000;
    uint64_t first = ROWS * (uint64_t)ranks.rank / ranks.world;
    uint64_t rows = ROWS * (uint64_t)(ranks.rank + 1) / ranks.world - first;
    ckd_save_options save = CKD_SAVE_OPTIONS_INIT;
    save.run = "toy";
    ckd_session_options options = CKD_SESSION_OPTIONS_INIT;
    options.save = &save;
    options.ranks = &ranks;
    options.every_steps = argc > 6 ? strtoull(argv[6], NULL, 10) : 5;
    ckd_session *s;
    ckd_error err;
    ckd_checkpoint from = {.step = 0};
    check(ckd_session_open(&s, argv[1], &options, &err), &err);
    add_all(s, first, rows);
    if (ckd_session_restore(&from, s, CKD_LATEST, &err) != CKD_OK && err.status != CKD_E_NOT_FOUND) {
        check(err.status, &err);
    }
    printf("resumes after step %d\n", (int)from.step);
    fflush(stdout);
    uint64_t steps = strtoull(argv[5], NULL, 10) + (argv[5][0] == '+' ? from.step : 0);
    for (uint64_t step = from.step + 1; step <= steps; step++) {
        ckd_session_fence(s);
        train(first, rows);
        check(step < steps ? ckd_session_step(s, step, &err) : ckd_session_save(s, step, &err), &err);
    }
    check(ckd_session_close(s, &err), &err);
    return 0;
}
