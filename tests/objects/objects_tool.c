/*
 * Drives objects/ from the tests in Python: objects_tool ADDRESS COMMAND ARGUMENT... Options come from the environment:
 * CKD_TEST_ATTEMPTS, _PAUSE_MS, _STALL_MS, _PART, _CONNECTIONS, _BYTES_PER_S, _DEADLINE_MS, _CANCEL_AFTER (polls),
 * _PROFILE. A failed call prints `STATUS: message` and ends with 1.
 */
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "objects/objects.h"

typedef struct tool {
    object_store *store;
    object_call call;
    char **arguments;
    int count;
} tool;

static long polls_left = -1;

static ckd_status count_down(void *context, ckd_error *err) {
    (void)context;
    if (polls_left > 0) {
        polls_left--;
    }
    return polls_left == 0 ? err_set(err, CKD_E_CANCELLED, "the test cancelled it") : CKD_OK;
}

static uint64_t setting(const char *name) {
    char full[64];
    snprintf(full, sizeof(full), "CKD_TEST_%s", name);
    const char *value = getenv(full);
    return value ? strtoull(value, NULL, 10) : 0;
}

/* Bytes that differ with seed and place; a shifted or repeated slice is noticed. */
static void fill(uint8_t *to, uint64_t from, size_t size, uint64_t seed) {
    for (size_t i = 0; i < size; i++) {
        uint64_t x =
            ((from + i) / 8 + 1) * UINT64_C(0x9e3779b97f4a7c15) + seed * UINT64_C(0xbf58476d1ce4e5b9);
        x ^= x >> 29;
        x *= UINT64_C(0x94d049bb133111eb);
        x ^= x >> 32;
        to[i] = (uint8_t)(x >> ((from + i) % 8 * 8));
    }
}

static uint64_t number(const tool *t, int i) {
    return i < t->count ? strtoull(t->arguments[i], NULL, 10) : 0;
}

static const char *text(const tool *t, int i) {
    return i < t->count ? t->arguments[i] : "";
}

static ckd_status put_text(tool *t, ckd_error *err) {
    object_source from = {.data = text(t, 1), .size = strlen(text(t, 1))};
    return objects_put(t->store, text(t, 0), &from, &t->call, err);
}

static ckd_status put_new(tool *t, ckd_error *err) {
    object_source from = {.data = text(t, 1), .size = strlen(text(t, 1))};
    return objects_put_new(t->store, text(t, 0), &from, &t->call, err);
}

static ckd_status put_file(tool *t, ckd_error *err) {
    file_reader *file = NULL;
    ckd_status status = file_open_read(&file, text(t, 1), err);
    if (status == CKD_OK) {
        uint64_t offset = number(t, 2);
        object_source from = {.file = file, .offset = offset, .size = file_size(file) - offset};
        status = objects_put(t->store, text(t, 0), &from, &t->call, err);
        file_close_read(file);
    }
    return status;
}

/* KEY SIZE SEED */
static ckd_status put_made(tool *t, ckd_error *err) {
    size_t size = number(t, 1);
    uint8_t *data = malloc(size + 1);
    fill(data, 0, size, number(t, 2));
    object_source from = {.data = data, .size = size};
    ckd_status status = objects_put(t->store, text(t, 0), &from, &t->call, err);
    free(data);
    return status;
}

/* KEY OFFSET SIZE SEED */
static ckd_status check_made(tool *t, ckd_error *err) {
    size_t size = number(t, 2);
    uint8_t *data = malloc(size + 1), *right = malloc(size + 1);
    object_range range = {number(t, 1), data, size};
    ckd_status status = objects_get(t->store, text(t, 0), &range, &t->call, err);
    fill(right, number(t, 1), size, number(t, 3));
    if (status == CKD_OK && memcmp(data, right, size) != 0) {
        status = err_set(err, CKD_E_CORRUPT, "other bytes came");
    }
    free(data);
    free(right);
    return status;
}

static ckd_status get(tool *t, ckd_error *err) {
    size_t size = number(t, 2);
    char *data = malloc(size + 1);
    object_range range = {number(t, 1), data, size};
    ckd_status status = objects_get(t->store, text(t, 0), &range, &t->call, err);
    if (status == CKD_OK) {
        fwrite(data, 1, size, stdout);
    }
    free(data);
    return status;
}

static ckd_status size_of(tool *t, ckd_error *err) {
    uint64_t size = 0;
    ckd_status status = objects_size(t->store, text(t, 0), &size, &t->call, err);
    if (status == CKD_OK) {
        printf("%llu\n", (unsigned long long)size);
    }
    return status;
}

static ckd_status delete_keys(tool *t, ckd_error *err) {
    return objects_delete(t->store, (const char *const *)t->arguments, (size_t)t->count, &t->call, err);
}

/* PREFIX AFTER LIMIT: pages, with a line `--` between two. */
static ckd_status list(tool *t, ckd_error *err) {
    object_query query = {text(t, 0), text(t, 1), (uint32_t)number(t, 2)};
    object_page page = {0};
    char *after = NULL;
    ckd_status status = CKD_OK;
    for (bool more = true; more && status == CKD_OK;) {
        status = objects_list(t->store, &query, &page, &t->call, err);
        for (size_t i = 0; i < page.count; i++) {
            printf("%s %llu\n", page.items[i].key, (unsigned long long)page.items[i].size);
        }
        free(after);
        after = page.next;
        page.next = NULL;
        query.after = after;
        more = after != NULL;
        if (more) {
            puts("--");
        }
        object_page_free(&page);
    }
    free(after);
    return status;
}

static ckd_status abort_uploads(tool *t, ckd_error *err) {
    uint64_t count = 0;
    ckd_status status = objects_abort_uploads(t->store, number(t, 0), &count, &t->call, err);
    if (status == CKD_OK) {
        printf("%llu\n", (unsigned long long)count);
    }
    return status;
}

static ckd_status probe(tool *t, ckd_error *err) {
    bool honoured = false;
    ckd_status status = objects_probe(t->store, &honoured, &t->call, err);
    if (status == CKD_OK) {
        puts(honoured ? "honoured" : "ignored");
    }
    return status;
}

/* A child is refused, and neither it nor its end harms the parent's connections. */
static ckd_status after_fork(tool *t, ckd_error *err) {
    ckd_status status = put_text(t, err);
    pid_t child = status == CKD_OK ? fork() : -1;
    int result = -1;
    if (child == 0) {
        ckd_error why = {0};
        status = put_text(t, &why);
        objects_close(t->store);
        fprintf(stderr, "%s", why.message);
        _exit(status == CKD_E_STATE ? 0 : 1);
    }
    if (child > 0) {
        waitpid(child, &result, 0);
    }
    if (status == CKD_OK && result != 0) {
        status = err_set(err, CKD_E_MISMATCH, "the child was not refused");
    }
    THEN(status, put_text(t, err));
    return status;
}

/* Prints how many connections a program that is started now would inherit. */
static ckd_status inherited(tool *t, ckd_error *err) {
    int count = 0;
    ckd_status status = put_text(t, err);
    for (int fd = 3; fd < 256; fd++) {
        struct sockaddr_storage peer;
        socklen_t size = sizeof(peer);
        bool far = getpeername(fd, (struct sockaddr *)&peer, &size) == 0 && peer.ss_family != AF_UNIX;
        count += far && !(fcntl(fd, F_GETFD) & FD_CLOEXEC);
    }
    printf("%d\n", count);
    return status;
}

/* ---- WRITERS ROUNDS KEY: in each round all writers put the same new key at the same time ---- */

enum { WRITERS_MAX = 32 };
typedef struct race {
    tool *t;
    pthread_barrier_t barrier;
    uint64_t rounds;
    _Atomic uint64_t wins[4096], errors;
    _Atomic int winner[4096];
    ckd_error why;
    pthread_mutex_t mutex;
} race;
typedef struct racer {
    race *r;
    int number;
} racer;

static void *run_racer(void *context) {
    racer *x = context;
    race *r = x->r;
    for (uint64_t round = 0; round < r->rounds; round++) {
        char key[100], data[100];
        ckd_error err = {0};
        snprintf(key, sizeof(key), "%.60s/%llu", text(r->t, 2), (unsigned long long)round);
        snprintf(data, sizeof(data), "writer %d of round %llu", x->number, (unsigned long long)round);
        object_source from = {.data = data, .size = strlen(data)};
        pthread_barrier_wait(&r->barrier);
        ckd_status status = objects_put_new(r->t->store, key, &from, &r->t->call, &err);
        if (status == CKD_OK) {
            r->wins[round]++;
            r->winner[round] = x->number;
        } else if (status != CKD_E_EXISTS) {
            r->errors++;
            pthread_mutex_lock(&r->mutex);
            r->why = err;
            pthread_mutex_unlock(&r->mutex);
        }
    }
    return NULL;
}

/* What is stored is what the winner wrote. */
static bool winner_stored(race *r, uint64_t round) {
    char key[100], data[100], there[100] = {0};
    ckd_error err = {0};
    snprintf(key, sizeof(key), "%.60s/%llu", text(r->t, 2), (unsigned long long)round);
    snprintf(data, sizeof(data), "writer %d of round %llu", r->winner[round], (unsigned long long)round);
    object_range range = {0, there, strlen(data)};
    return objects_get(r->t->store, key, &range, NULL, &err) == CKD_OK && strcmp(there, data) == 0;
}

static ckd_status run_race(tool *t, ckd_error *err) {
    static race r;
    static racer racers[WRITERS_MAX];
    pthread_t threads[WRITERS_MAX];
    unsigned writers = (unsigned)number(t, 0);
    uint64_t one = 0, none = 0, several = 0, stored = 0;
    if (writers > WRITERS_MAX || number(t, 1) > 4096) {
        return err_set(err, CKD_E_INVALID, "too many");
    }
    r.t = t;
    r.rounds = number(t, 1);
    pthread_mutex_init(&r.mutex, NULL);
    pthread_barrier_init(&r.barrier, NULL, writers);
    for (unsigned i = 0; i < writers; i++) {
        racers[i] = (racer){&r, (int)i};
        pthread_create(&threads[i], NULL, run_racer, &racers[i]);
    }
    for (unsigned i = 0; i < writers; i++) {
        pthread_join(threads[i], NULL);
    }
    for (uint64_t i = 0; i < r.rounds; i++) {
        one += r.wins[i] == 1;
        none += r.wins[i] == 0;
        several += r.wins[i] > 1;
        stored += r.wins[i] == 1 && winner_stored(&r, i);
    }
    printf("one %llu none %llu several %llu stored %llu errors %llu\n", (unsigned long long)one,
           (unsigned long long)none, (unsigned long long)several, (unsigned long long)stored,
           (unsigned long long)r.errors);
    if (r.errors) {
        fprintf(stderr, "%s\n", r.why.message);
    }
    return CKD_OK;
}

/* COUNT SEED: puts and reads. Prints how many ended right, with an error, or wrong; the last error goes to stderr. */
static ckd_status storm(tool *t, ckd_error *err) {
    uint64_t right = 0, failed = 0, wrong = 0;
    (void)err;
    for (uint64_t i = 0; i < number(t, 0); i++) {
        char key[64];
        uint64_t seed = number(t, 1) + i;
        size_t size = (size_t)(seed * 7919 % 40000) + 1;
        uint8_t *data = malloc(size), *back = calloc(1, size);
        ckd_error why = {0};
        fill(data, 0, size, seed);
        snprintf(key, sizeof(key), "storm/%llu", (unsigned long long)i);
        object_source from = {.data = data, .size = size};
        object_range range = {0, back, size};
        ckd_status status = i % 2 ? objects_put_new(t->store, key, &from, &t->call, &why)
                                  : objects_put(t->store, key, &from, &t->call, &why);
        THEN(status, objects_get(t->store, key, &range, &t->call, &why));
        right += status == CKD_OK && memcmp(data, back, size) == 0;
        wrong += status == CKD_OK && memcmp(data, back, size) != 0;
        failed += status != CKD_OK;
        if (status != CKD_OK) {
            fprintf(stderr, "%d: %s\n", (int)status, why.message);
        }
        free(data);
        free(back);
    }
    printf("right %llu failed %llu wrong %llu\n", (unsigned long long)right, (unsigned long long)failed,
           (unsigned long long)wrong);
    return CKD_OK;
}

/*
 * ---- THREADS COUNT SEED: operations of all kinds, each thread on its own keys, of which it knows what must be there
 * ----
 */

enum { MIXED_MAX = 1000, LARGE = (5 << 20) + 17 };
typedef struct mixed {
    tool *t;
    int number;
    uint64_t random, right, failed, wrong;
    size_t count;
    struct {
        size_t size;
        bool there;
    } objects[MIXED_MAX];
} mixed;

static uint64_t draw(mixed *m, uint64_t below) {
    m->random ^= m->random << 13;
    m->random ^= m->random >> 7;
    m->random ^= m->random << 17;
    return m->random % below;
}

static void name_object(char key[64], const mixed *m, size_t i) {
    snprintf(key, 64, "mixed/%d/%05zu", m->number, i);
}

static uint64_t seed_of(const mixed *m, size_t i) {
    return (uint64_t)m->number * MIXED_MAX + i;
}

/*
 * A new object, or one that is there already. The line tells a test, which may kill this program, that the object must
 * be there.
 */
static ckd_status mixed_put(mixed *m, size_t i, bool only_new, bool *wrong, ckd_error *err) {
    char key[64];
    bool there = i < m->count;
    size_t size = draw(m, 40) ? (size_t)draw(m, 30000) : only_new ? 0 : (size_t)LARGE;
    uint8_t *data = malloc(size + 1);
    name_object(key, m, i);
    fill(data, 0, size, seed_of(m, i));
    object_source from = {.data = data, .size = size};
    ckd_status status = (only_new ? objects_put_new : objects_put)(m->t->store, key, &from, &m->t->call, err);
    free(data);
    *wrong = there ? status == CKD_OK : status == CKD_E_EXISTS;
    if (there) {
        return status == CKD_E_EXISTS ? CKD_OK : status;
    }
    m->objects[i].size = size;
    m->objects[i].there = status == CKD_OK;
    m->count++;
    if (status == CKD_OK) {
        printf("put %s %zu %llu\n", key, size, (unsigned long long)seed_of(m, i));
    }
    return status;
}

static ckd_status mixed_read(mixed *m, size_t i, bool *wrong, ckd_error *err) {
    char key[64];
    size_t from = m->objects[i].size ? draw(m, m->objects[i].size) : 0, size = m->objects[i].size - from;
    uint8_t *data = calloc(1, size + 1), *right = malloc(size + 1);
    object_range range = {from, data, size};
    name_object(key, m, i);
    fill(right, from, size, seed_of(m, i));
    ckd_status status = objects_get(m->t->store, key, &range, &m->t->call, err);
    *wrong = m->objects[i].there ? status == CKD_OK && memcmp(data, right, size) != 0 : status == CKD_OK;
    *wrong = *wrong || (m->objects[i].there && (status == CKD_E_NOT_FOUND || status == CKD_E_CORRUPT));
    free(data);
    free(right);
    return !m->objects[i].there && status == CKD_E_NOT_FOUND ? CKD_OK : status;
}

static ckd_status mixed_delete(mixed *m, size_t i, ckd_error *err) {
    char key[64];
    const char *const keys[] = {key};
    name_object(key, m, i);
    printf("delete %s\n", key);
    ckd_status status = objects_delete(m->t->store, keys, 1, &m->t->call, err);
    m->objects[i].there = m->objects[i].there && status != CKD_OK;
    return status;
}

static ckd_status mixed_list(mixed *m, bool *wrong, ckd_error *err) {
    char prefix[64], key[64], *after = NULL;
    size_t i = 0;
    ckd_status status = CKD_OK;
    snprintf(prefix, sizeof(prefix), "mixed/%d/", m->number);
    do {
        object_query query = {prefix, after, 7};
        object_page page = {0};
        status = objects_list(m->t->store, &query, &page, &m->t->call, err);
        for (size_t j = 0; j < page.count; j++, i++) {
            while (i < m->count && !m->objects[i].there) {
                i++;
            }
            name_object(key, m, i);
            *wrong = *wrong || i >= m->count || strcmp(page.items[j].key, key) != 0 ||
                     page.items[j].size != m->objects[i].size;
        }
        free(after);
        after = page.next;
        page.next = NULL;
        object_page_free(&page);
    } while (after && status == CKD_OK);
    free(after);
    for (; status == CKD_OK && i < m->count; i++) {
        *wrong = *wrong || m->objects[i].there;
    }
    return status;
}

static void *run_mixed(void *context) {
    mixed *m = context;
    for (uint64_t done = 0; done < number(m->t, 1); done++) {
        uint64_t kind = draw(m, 8);
        size_t some = m->count ? (size_t)draw(m, m->count) : 0;
        ckd_error err = {0};
        bool wrong = false;
        ckd_status status;
        if (kind < 3 || !m->count) {
            status = mixed_put(m, m->count, kind == 0, &wrong, &err);
        } else if (kind < 5) {
            status = mixed_read(m, some, &wrong, &err);
        } else if (kind == 5) {
            status = mixed_delete(m, some, &err);
        } else if (kind == 6 || !m->objects[some].there) {
            status = mixed_list(m, &wrong, &err);
        } else {
            status = mixed_put(m, some, true, &wrong, &err);
        }
        m->wrong += wrong;
        m->failed += !wrong && status != CKD_OK;
        m->right += !wrong && status == CKD_OK;
        if (wrong || status != CKD_OK) {
            fprintf(stderr, "%llu: %d: %s\n", (unsigned long long)kind, (int)status, err.message);
        }
    }
    return NULL;
}

static ckd_status mix(tool *t, ckd_error *err) {
    static mixed all[WRITERS_MAX];
    pthread_t threads[WRITERS_MAX];
    uint64_t right = 0, failed = 0, wrong = 0;
    size_t count = (size_t)number(t, 0);
    if (count > WRITERS_MAX || number(t, 1) > MIXED_MAX) {
        return err_set(err, CKD_E_INVALID, "too many");
    }
    setvbuf(stdout, NULL, _IOLBF, 0);
    for (size_t i = 0; i < count; i++) {
        all[i] = (mixed){.t = t, .number = (int)i, .random = (number(t, 2) + 1) * 7919 + i};
        pthread_create(&threads[i], NULL, run_mixed, &all[i]);
    }
    for (size_t i = 0; i < count; i++) {
        pthread_join(threads[i], NULL);
        right += all[i].right;
        failed += all[i].failed;
        wrong += all[i].wrong;
    }
    printf("right %llu failed %llu wrong %llu\n", (unsigned long long)right, (unsigned long long)failed,
           (unsigned long long)wrong);
    return CKD_OK;
}

static const struct {
    const char *name;
    ckd_status (*run)(tool *t, ckd_error *err);
} commands[] = {{"put", put_text},        {"put-new", put_new},
                {"put-file", put_file},   {"make", put_made},
                {"check", check_made},    {"get", get},
                {"size", size_of},        {"delete", delete_keys},
                {"list", list},           {"abort", abort_uploads},
                {"probe", probe},         {"race", run_race},
                {"storm", storm},         {"fork", after_fork},
                {"inherited", inherited}, {"mix", mix}};

static ckd_status run(tool *t, const char *command, ckd_error *err) {
    for (size_t i = 0; i < sizeof(commands) / sizeof(commands[0]); i++) {
        if (strcmp(commands[i].name, command) == 0) {
            return commands[i].run(t, err);
        }
    }
    return err_set(err, CKD_E_INVALID, "no command %s", command);
}

int main(int argc, char **argv) {
    static const char *const names[] = {"OK",        "INVALID", "NOMEM",    "IO",          "NOSPACE",
                                        "NOT_FOUND", "EXISTS",  "CORRUPT",  "UNSUPPORTED", "BUSY",
                                        "READ_ONLY", "STATE",   "MISMATCH", "CANCELLED",   "DEVICE"};
    if (argc < 3) {
        fputs("objects_tool ADDRESS COMMAND ARGUMENT...\n", stderr);
        return 2;
    }
    object_options options = {.attempts = (uint32_t)setting("ATTEMPTS"),
                              .pause_ms = (uint32_t)setting("PAUSE_MS"),
                              .stall_ms = (uint32_t)setting("STALL_MS"),
                              .connections = (uint32_t)setting("CONNECTIONS"),
                              .part_size = setting("PART"),
                              .bytes_per_s = setting("BYTES_PER_S"),
                              .profile = getenv("CKD_TEST_PROFILE")};
    tool t = {.arguments = argv + 3, .count = argc - 3};
    ckd_error err = {0};
    ckd_status status = objects_open(&t.store, argv[1], &options, &err);
    if (status == CKD_OK) {
        uint64_t deadline = setting("DEADLINE_MS"), polls = setting("CANCEL_AFTER");
        t.call.deadline_ns = deadline ? clock_monotonic_ns() + deadline * 1000000 : 0;
        polls_left = polls ? (long)polls : -1;
        t.call.poll = polls ? count_down : NULL;
        status = run(&t, argv[2], &err);
        objects_close(t.store);
    }
    if (status != CKD_OK) {
        fprintf(stderr, "%s: %s\n", names[status], err.message);
    }
    return status == CKD_OK ? 0 : 1;
}
