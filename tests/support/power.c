#include "tests/support/level.h"
#include "tests/support/power.h"

#include <dlfcn.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <fcntl.h>
#include <glob.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/support/crash_disk.h"
#include "tests/support/scenes.h"
#include "tests/support/tempdir.h"

enum {
    SITES_MAX = 256,
    CALLERS_MAX = 1024,
    LABEL_MAX = 160,
    STATES_USUAL = 100,
    STATES_WITHOUT = 400,
    RANDOM_MORE = 2
};

static uint64_t number_of(const char *variable, uint64_t usual) {
    const char *text = getenv(variable);
    return text && *text ? strtoull(text, NULL, 10) : usual;
}

/* ---- checking disks ---- */

typedef struct batch {
    power *p;
    const crash_states *states;
    bool all_thorough;
    crash_syncs_fn syncs;
    const void *context;
    volatile size_t *at; /* in shared memory: the state that is being checked */
} batch;

static void check_states(void **state) {
    const batch *b = *state;
    crash_disk *d = crash_disk_new(&b->p->record, b->syncs, b->context);
    for (size_t i = 0; i < b->states->count; i++) {
        const crash_state *s = &b->states->items[i];
        char path[512], *image = tempdir_create();
        *b->at = i;
        snprintf(path, sizeof(path), "%s/disk", image);
        crash_disk_write(d, s, path);
        b->p->check(path, &b->p->expected[s->expected], b->all_thorough || s->key % 3 == 0, b->p->context);
        tempdir_remove(image);
    }
    *b->at = b->states->count;
    crash_disk_free(d);
}

/* Checks the states as a test in a process of its own, so that a failure ends only that process. */
static int check_in_child(batch *b, const char *images, int output) {
    const struct CMUnitTest tests[] = {{"disks", check_states, NULL, NULL, b}};
    assert_true(dup2(output, STDOUT_FILENO) >= 0 && dup2(output, STDERR_FILENO) >= 0);
    setenv("TMPDIR", images, 1);
    unsetenv("CMOCKA_MESSAGE_OUTPUT"); /* the runner must not count this test */
    unsetenv("CMOCKA_XML_FILE");
    cmocka_set_test_filter(NULL);
    return cmocka_run_group_tests_name("disks", tests, NULL, NULL);
}

/* Returns the number of the first wrong state, or SIZE_MAX. Its message goes to `said`. */
static size_t first_wrong(batch *b, char *said, size_t size) {
    int status;
    FILE *output = tmpfile();
    b->at = mmap(NULL, sizeof(*b->at), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(output && b->at != MAP_FAILED);
    char *images = tempdir_create();
    fflush(NULL);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        int failed = check_in_child(b, images, fileno(output));
        fflush(NULL);
        _exit(failed ? 1 : 0);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    tempdir_remove(images);
    size_t at = *b->at;
    assert_true((at == b->states->count) == (status == 0)); /* all states were checked, or one was wrong */
    at = status == 0 ? SIZE_MAX : at;
    munmap((void *)b->at, sizeof(*b->at));
    rewind(output);
    size_t got = fread(said, 1, size - 1, output);
    said[got] = '\0';
    fclose(output);
    return at;
}

/* ---- choosing ---- */

/* Keeps all simple states, and about `most` of the others; 0: all. */
static void choose(crash_states *states, uint64_t most, uint64_t seed) {
    size_t kept = 0, others = 0, at = 0;
    for (size_t i = 0; i < states->count; i++) {
        others += !states->items[i].simple;
    }
    for (size_t i = 0; i < states->count; i++) {
        const crash_state *s = &states->items[i];
        at += !s->simple;
        /* Keys cannot be used to choose: ids differ in each run. */
        uint64_t drawn = (at + seed) * 0x9e3779b97f4a7c15u >> 20;
        if (s->simple || most == 0 || drawn % others < most) {
            states->items[kept++] = *s;
        }
    }
    states->count = kept;
}

static crash_keys keys_copy(const crash_keys *k) {
    crash_keys copy = *k;
    copy.slots = malloc(k->capacity * sizeof(*k->slots) + 1);
    assert_non_null(copy.slots);
    memcpy(copy.slots, k->slots, k->capacity * sizeof(*k->slots));
    return copy;
}

/* ---- places in the code that sync ---- */

typedef struct sync_site {
    char label[LABEL_MAX]; /* file:function, and a number from the second place of the function on */
    char file[LABEL_MAX];
    unsigned line;
    bool reached, needed;
} sync_site;

static sync_site sites[SITES_MAX];
static size_t site_count;
static const char *const *spared;
static struct {
    void *frames[OP_FRAMES];
    size_t site; /* SIZE_MAX: the caller is SQLite */
} callers[CALLERS_MAX];
static size_t caller_count;

static bool calls_sync(const char *line) {
    const char *const calls[] = {"file_sync(", "dir_sync("};
    for (size_t i = 0; i < sizeof(calls) / sizeof(calls[0]); i++) {
        const char *at = strstr(line, calls[i]);
        bool begins = at && (at == line || !(at[-1] == '_' || (at[-1] >= 'a' && at[-1] <= 'z')));
        if (begins && (line[0] == ' ' || line[0] == '\t') && !strstr(line, " * ")) {
            return true;
        }
    }
    return false;
}

/* Finds the function's name in a line such as "static ckd_status name(...". */
static void remember_function(char out[64], const char *line) {
    const char *open = strchr(line, '('), *begin = open;
    if (line[0] < 'a' || line[0] > 'z' || !open || strncmp(line, "typedef", 7) == 0) {
        return;
    }
    while (begin > line && (begin[-1] == '_' || (begin[-1] >= '0' && begin[-1] <= '9') ||
                            (begin[-1] >= 'a' && begin[-1] <= 'z'))) {
        begin--;
    }
    snprintf(out, 64, "%.*s", (int)(open - begin), begin);
}

static void add_site(const char *path, const char *function, unsigned line) {
    unsigned before = 0;
    char label[LABEL_MAX];
    snprintf(label, sizeof(label), "%.80s:%.60s", path, function);
    for (size_t i = 0; i < site_count; i++) {
        before += strncmp(sites[i].label, label, strlen(label)) == 0 &&
                  strchr("#", sites[i].label[strlen(label)]) != NULL;
    }
    assert_true(site_count < SITES_MAX);
    sync_site *s = &sites[site_count++];
    *s = (sync_site){.line = line};
    snprintf(s->file, sizeof(s->file), "%.80s", path);
    snprintf(s->label, sizeof(s->label), before ? "%.140s#%u" : "%.140s", label, before + 1);
}

/* Finds every call that makes something durable in the sources. The test runs in their root. */
static void read_sources(void) {
    glob_t found = {0};
    if (site_count) {
        return;
    }
    const char *const folders[] = {"base/*.c", "codec/*/*.c", "catalog/*.c", "engine/*/*.c", "agent/*.c"};
    for (size_t i = 0; i < sizeof(folders) / sizeof(folders[0]); i++) {
        glob(folders[i], i ? GLOB_APPEND : 0, NULL, &found);
    }
    assert_true(found.gl_pathc > 0);
    for (size_t i = 0; i < found.gl_pathc; i++) {
        char text[512], function[64] = "";
        unsigned line = 0;
        FILE *f = fopen(found.gl_pathv[i], "r");
        assert_non_null(f);
        while (fgets(text, sizeof(text), f)) {
            line++;
            remember_function(function, text);
            if (calls_sync(text)) {
                add_site(found.gl_pathv[i], function, line);
            }
        }
        fclose(f);
    }
    globfree(&found);
    assert_true(site_count > 20);
}

/* Finds the place for a line such as "/some/where/engine/retain/trash.c:117 (discriminator 3)". */
static size_t site_of_line(const char *where) {
    const char *colon = strrchr(where, ':');
    unsigned line = colon ? (unsigned)strtoul(colon + 1, NULL, 10) : 0;
    size_t best = SIZE_MAX;
    for (size_t i = 0; i < site_count && colon; i++) {
        const sync_site *s = &sites[i];
        size_t length = strlen(s->file);
        bool file = (size_t)(colon - where) >= length && memcmp(colon - length, s->file, length) == 0;
        best = file && s->line == line ? i : best;
    }
    return best;
}

/* Finds the innermost caller that is a known place, using the program's debugging information. */
static size_t find_site(void *const frames[OP_FRAMES]) {
    Dl_info info, own;
    char command[512], line[1024], said[4096] = "";
    assert_true(dladdr((void *)(uintptr_t)find_site, &own) && own.dli_fbase);
    if (!dladdr(frames[0], &info) || info.dli_fbase != own.dli_fbase) {
        return SIZE_MAX;
    }
    int used = snprintf(command, sizeof(command), "addr2line -i -e /proc/%d/exe", (int)getpid());
    for (size_t i = 0; i < OP_FRAMES && frames[i]; i++) {
        uintptr_t offset = (uintptr_t)frames[i] - (uintptr_t)own.dli_fbase - 1;
        used +=
            snprintf(command + used, sizeof(command) - (size_t)used, " 0x%llx", (unsigned long long)offset);
    }
    FILE *p = popen(command, "r");
    assert_non_null(p);
    size_t found = SIZE_MAX;
    while (fgets(line, sizeof(line), p)) {
        found = found == SIZE_MAX ? site_of_line(line) : found;
        strncat(said, line, sizeof(said) - strlen(said) - 1);
    }
    pclose(p);
    if (found == SIZE_MAX) {
        fail_msg("something syncs where no call was found in the sources: %s", said);
    }
    return found;
}

static size_t site_of(void *const frames[OP_FRAMES]) {
    for (size_t i = 0; i < caller_count; i++) {
        if (memcmp(callers[i].frames, frames, sizeof(callers[i].frames)) == 0) {
            return callers[i].site;
        }
    }
    assert_true(caller_count < CALLERS_MAX);
    memcpy(callers[caller_count].frames, frames, sizeof(callers[0].frames));
    callers[caller_count].site = find_site(frames);
    return callers[caller_count++].site;
}

static bool is_of_site(const op *o, size_t site) {
    return (o->kind == OP_SYNC || o->kind == OP_DIR_SYNC) && site_of(o->frames) == site;
}

static bool syncs_but(const void *context, const op *o) {
    return !is_of_site(o, *(const size_t *)context);
}

static void note_reached(const op_record *r) {
    read_sources();
    for (size_t i = 0; i < r->count; i++) {
        const op *o = &r->ops[i];
        size_t site = o->kind == OP_SYNC || o->kind == OP_DIR_SYNC ? site_of(o->frames) : SIZE_MAX;
        if (site != SIZE_MAX) {
            sites[site].reached = true;
        }
    }
}

static bool in_record(const op_record *r, size_t site) {
    for (size_t i = 0; i < r->count; i++) {
        if (is_of_site(&r->ops[i], site)) {
            return true;
        }
    }
    return false;
}

/* An entry is a label, or the beginning of labels followed by *, then a space and a reason. */
static bool spares(const char *entry, const char *label) {
    size_t length = strcspn(entry, " ");
    assert_true(entry[length] == ' ' && length > 1);
    if (entry[length - 1] == '*') {
        return strncmp(label, entry, length - 1) == 0;
    }
    return strlen(label) == length && memcmp(entry, label, length) == 0;
}

static bool is_spared(const char *label) {
    for (const char *const *s = spared; s && *s; s++) {
        if (spares(*s, label)) {
            return true;
        }
    }
    return false;
}

/* Counts the spared entries that no longer match a place in the sources. */
static size_t count_stale(void) {
    size_t stale = 0;
    for (const char *const *s = spared; s && *s; s++) {
        bool there = false;
        for (size_t i = 0; i < site_count; i++) {
            there = there || spares(*s, sites[i].label);
        }
        if (!there) {
            print_message("spared, but not in the sources: %s\n", *s);
        }
        stale += !there;
    }
    return stale;
}

static void leave_out(power *p, const crash_keys *keys, size_t site, uint64_t seed) {
    char said[8192];
    crash_states states = {0};
    crash_keys copy = keys_copy(keys);
    crash_states_add(&states, &copy, &p->record, 0, seed, syncs_but, &site);
    crash_keys_free(&copy);
    choose(&states, STATES_WITHOUT, seed);
    batch b = {.p = p, .states = &states, .all_thorough = true, .syncs = syncs_but, .context = &site};
    sites[site].needed = states.count > 0 && first_wrong(&b, said, sizeof(said)) != SIZE_MAX;
    if (getenv("CKD_POWER_VERBOSE")) {
        print_message("%s: without %s: %zu disks, %s\n", p->name, sites[site].label, states.count,
                      sites[site].needed ? said : "all right");
    }
    crash_states_free(&states);
}

/* ---- scenarios ---- */

void power_begin(power *p, const char *lost) {
    p->expected = NULL;
    p->expected_count = 0;
    recorder_start(&p->record, p->dir, lost);
    power_expect(p);
}

void power_expect(power *p) {
    p->expected = realloc(p->expected, (p->expected_count + 1) * sizeof(*p->expected));
    assert_non_null(p->expected);
    p->expected[p->expected_count] = p->now;
    recorder_expect(p->expected_count++);
}

static void check_all(power *p, crash_keys *keys, uint64_t most, uint64_t seed) {
    char said[8192];
    crash_states states = {0};
    crash_states_add(&states, keys, &p->record, RANDOM_MORE, seed, NULL, NULL);
    size_t possible = states.count;
    choose(&states, most, seed);
    print_message("%s: %zu operations, %zu disks, %zu checked\n", p->name, p->record.count, possible,
                  states.count);
    batch b = {.p = p, .states = &states};
    size_t wrong = first_wrong(&b, said, sizeof(said));
    if (wrong != SIZE_MAX) {
        crash_disk *d = crash_disk_new(&p->record, NULL, NULL);
        print_message("%s\n", crash_disk_describe(d, &states.items[wrong]));
        crash_disk_free(d);
        fail_msg("%s: a disk is wrong (seed %llu): %s", p->name, (unsigned long long)seed, said);
    }
    crash_states_free(&states);
}

void power_end(power *p, const char *name) {
    uint64_t most =
        number_of("CKD_POWER_STATES", under_sanitizer() ? 20 : test_pick(12, STATES_USUAL / 2, STATES_USUAL));
    /* The seed of the disks that lack a sync: one that is known to find wrong disks. */
    uint64_t seed = number_of("CKD_POWER_SEED", 1);
    crash_keys keys = {0};
    p->name = name;
    recorder_stop();
    note_reached(&p->record);
    assert_int_equal(count_stale(), 0);
    check_all(p, &keys, most, number_of("CKD_POWER_SEED", test_first(name, 1 << 16)));
    bool without = !under_sanitizer() && number_of("CKD_POWER_SITES", test_level_now() != TEST_QUICK);
    for (size_t i = 0; i < site_count && without; i++) {
        if (!sites[i].needed && !is_spared(sites[i].label) && in_record(&p->record, i)) {
            leave_out(p, &keys, i, seed);
        }
    }
    crash_keys_free(&keys);
    op_record_free(&p->record);
    free(p->expected);
}

void power_spare(const char *const *labels) {
    spared = labels;
}

void power_check_sites(void) {
    size_t wrong = 0, known = 0;
    read_sources();
    for (size_t i = 0; i < site_count; i++) {
        const sync_site *s = &sites[i];
        bool spare = is_spared(s->label);
        known += spare;
        if (!s->needed && !spare) {
            print_message("%s (line %u): %s\n", s->label, s->line,
                          s->reached ? "no disk is wrong without it" : "no scenario reaches it");
            wrong++;
        }
    }
    print_message("%zu places sync, %zu of them are spared\n", site_count, known);
    assert_int_equal(wrong, 0);
}
