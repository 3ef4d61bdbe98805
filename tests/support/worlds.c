#include "tests/support/worlds.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <signal.h>
#include <time.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/support/checkpoints.h"
#include "tests/support/scratch.h"

static struct shared { _Atomic uint64_t death_ns, told; } * shared; /* in memory that all processes share */

void worlds_forget(void) {
    shared->death_ns = shared->told = 0;
}

_Noreturn void die_now(void) {
    shared->death_ns = clock_monotonic_ns();
    raise(SIGKILL);
    abort();
}

void die_in(uint64_t ns) {
    timer_t timer;
    struct sigevent event = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGKILL};
    struct itimerspec when = {
        .it_value = {.tv_sec = (time_t)(ns / 1000000000), .tv_nsec = (long)(ns % 1000000000) + 1}};
    shared->death_ns = clock_monotonic_ns() + ns;
    assert_int_equal(timer_create(CLOCK_MONOTONIC, &event, &timer), 0);
    assert_int_equal(timer_settime(timer, 0, &when, NULL), 0);
}

uint64_t death_time_ns(void) {
    return shared->death_ns;
}

void tell(void) {
    shared->told++;
}

uint64_t told(void) {
    return shared->told;
}

void await_told(uint64_t count) {
    for (int i = 0; i < PATIENCE_MS && shared->told < count; i++) {
        usleep(1000);
    }
}

void worlds_begin(void) {
    shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED) {
        perror("worlds: no shared memory");
        abort();
    }
    scratch_begin();
}

void worlds_end(void) {
    scratch_end();
    munmap(shared, sizeof(*shared));
}

/* ---- processes ---- */

int fate_hook(void *context, file_op step, const char *path) {
    fate *f = context;
    if (step != f->step && (step == FILE_OP_READ || step == FILE_OP_OPEN || step == FILE_OP_LOCK)) {
        return 0; /* not counted: waiting ranks do these in varying numbers */
    }
    bool now = f->at ? ++f->seen == f->at : f->where && step == f->step && strstr(path, f->where);
    if (now && f->fail) {
        return f->fail;
    }
    if (f->dying || (now && !(f->torn && step == FILE_OP_WRITE))) {
        die_now();
    }
    f->dying = now;
    return now ? -4 : 0;
}

static ckd_status be_rank(outcome *out, const world *w, uint32_t rank, ckd_error *err) {
    ckd_store *store;
    ckd_ranks *ranks;
    fate mine = w->fate ? *w->fate : (fate){.rank = UINT32_MAX};
    ckd_ranks_options o = CKD_RANKS_OPTIONS_INIT;
    o.rank = rank;
    o.world = w->size;
    o.group = "a launch";
    o.timeout_ms = w->timeout_ms ? w->timeout_ms : PATIENCE_MS;
    o.timeout_ms = rank == 0 && w->first_timeout_ms ? w->first_timeout_ms : o.timeout_ms;
    ckd_status status = scene_open(&store, w->dir, CKD_OPEN_WRITE, err);
    if (status != CKD_OK) {
        return status;
    }
    if (w->before) {
        w->before(w, rank);
    }
    status = ckd_ranks_join(&ranks, store, &o, err);
    if (status == CKD_OK) {
        if (mine.rank == rank) {
            file_set_fault_hook(fate_hook, &mine);
        }
        status = w->act(&out->info, ranks, store, w, rank, err);
    }
    out->ended_ns = clock_monotonic_ns();
    ckd_ranks_leave(ranks);
    ckd_store_close(store);
    return status;
}

void run_world(outcome out[WORLD_MOST], const world *w) {
    int ends[WORLD_MOST][2], state;
    pid_t pids[WORLD_MOST];
    uint32_t started = w->started ? w->started : w->size;
    fflush(NULL);
    memset(out, 0, WORLD_MOST * sizeof(out[0]));
    for (uint32_t r = 0; r < started; r++) {
        assert_int_equal(pipe(ends[r]), 0);
        pids[r] = fork();
        assert_true(pids[r] >= 0);
        if (pids[r] == 0) {
            ckd_error err = {0};
            outcome mine = {0};
            alarm(PATIENCE_MS / 1000 * 2);
            mine.status = be_rank(&mine, w, r, &err);
            snprintf(mine.message, sizeof(mine.message), "%.255s", err.message);
            _exit(write(ends[r][1], &mine, sizeof(mine)) != sizeof(mine));
        }
        close(ends[r][1]);
    }
    for (uint32_t r = 0; r < started; r++) {
        bool told = read(ends[r][0], &out[r], sizeof(out[r])) == sizeof(out[r]);
        close(ends[r][0]);
        assert_int_equal(waitpid(pids[r], &state, 0), pids[r]);
        out[r].killed = WIFSIGNALED(state);
        bool ended = told && WIFEXITED(state) && WEXITSTATUS(state) == 0;
        if (!ended && !(out[r].killed && WTERMSIG(state) == SIGKILL)) {
            fail_msg("rank %u ended with %d, signal %d", r, WEXITSTATUS(state), WTERMSIG(state));
        }
    }
}

void all_went_well(const world *w) {
    outcome out[WORLD_MOST];
    run_world(out, w);
    for (uint32_t r = 0; r < w->size; r++) {
        if (out[r].killed || out[r].status != CKD_OK) {
            fail_msg("rank %u: %s", r, out[r].message);
        }
        assert_memory_equal(&out[r].info.id, &out[0].info.id, sizeof(ckd_id));
        assert_int_equal(out[r].info.stored_bytes, out[0].info.stored_bytes);
        assert_int_equal(out[r].info.world, w->size);
    }
}

/* ---- what ranks do ---- */

ckd_status save_share(ckd_checkpoint *info, ckd_ranks *ranks, const world *w, uint64_t step, uint32_t rank,
                      ckd_error *err) {
    ckd_save *save;
    ckd_error why = {0};
    scene s = scene_of(step);
    ckd_save_options o = options_of(s.run, s.step);
    ckd_status status = ckd_ranks_begin(&save, ranks, &o, err);
    if (status != CKD_OK) {
        return status;
    }
    if (scene_share(save, &s, rank, w->size, &why) != CKD_OK) {
        if (err) {
            *err = why;
        }
        return ckd_ranks_abort(ranks, save, &why);
    }
    return ckd_ranks_commit(info, ranks, save, err);
}

ckd_status act_saves(ckd_checkpoint *info, ckd_ranks *ranks, ckd_store *store, const world *w, uint32_t rank,
                     ckd_error *err) {
    (void)store;
    return save_share(info, ranks, w, w->step, rank, err);
}

ckd_status act_plans_and_saves(ckd_checkpoint *info, ckd_ranks *ranks, ckd_store *store, const world *w,
                               uint32_t rank, ckd_error *err) {
    const ckd_plan *plan;
    const uint64_t shape[1] = {WORLD_MOST};
    ckd_tensor t = CKD_TENSOR_INIT;
    t.name = "p";
    t.dtype = CKD_F32;
    t.ndim = 1;
    t.shape = shape;
    t.region = (ckd_region){
        .kind = CKD_REGION_FLAT, .start = rank, .count = rank + 1 == w->size ? WORLD_MOST - rank : 1};
    ckd_status status = ckd_ranks_plan(&plan, ranks, &t, 1, err);
    return status == CKD_OK ? act_saves(info, ranks, store, w, rank, err) : status;
}

ckd_status act_saves_thrice(ckd_checkpoint *info, ckd_ranks *ranks, ckd_store *store, const world *w,
                            uint32_t rank, ckd_error *err) {
    (void)store;
    ckd_status status = CKD_OK;
    for (uint64_t i = 0; i < 3 && status == CKD_OK; i++) {
        status = save_share(info, ranks, w, w->step + i, rank, err);
    }
    return status;
}

ckd_status begin_share(ckd_save **save, ckd_ranks *ranks, const scene *s, const world *w, uint32_t rank,
                       ckd_error *err) {
    ckd_save_options o = options_of(s->run, s->step);
    ckd_status status = ckd_ranks_begin(save, ranks, &o, err);
    if (status != CKD_OK) {
        *save = NULL;
        return status;
    }
    return scene_share(*save, s, rank, w->size, err);
}
