#include "tests/support/records.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "base/file.h"
#include "codec/chunk/chunk.h"
#include "engine/store/paths.h"

/* The ids of the checkpoints, by step, from 1. */
typedef struct history {
    ckd_id ids[RECORDS_LATEST + 1];
    unsigned latest;
} history;

static history history_of(ckd_store *store, unsigned latest) {
    history h = {.latest = latest};
    for (unsigned step = 1; step <= latest; step++) {
        ckd_checkpoint found;
        assert_int_equal(ckd_store_find(&found, store, "run", step, NULL), CKD_OK);
        h.ids[step] = found.id;
    }
    return h;
}

static unsigned step_of(const history *h, const ckd_id *id) {
    unsigned step = 1;
    while (step <= h->latest && memcmp(&h->ids[step], id, sizeof(*id)) != 0) {
        step++;
    }
    return step;
}

/* A buffer to whose end text is added. */
typedef struct text {
    char *out;
    size_t used, room;
} text;

static void describe_record(text *to, const history *h, unsigned step, const record *r) {
    char *at = to->out + to->used;
    size_t room = to->room - to->used;
    int n = snprintf(at, room, "%u %s %llu %u %u %llu %llx %u %llu %llu", step, r->tensor->name,
                     (unsigned long long)r->first, (unsigned)r->coding, (unsigned)r->predictor,
                     (unsigned long long)r->stored_size, (unsigned long long)r->checksum, (unsigned)r->depth,
                     (unsigned long long)r->chain_stored, (unsigned long long)r->base_stored);
    for (uint32_t i = 0; i < r->dependency_count && n < (int)room; i++) {
        n += snprintf(at + n, room - (size_t)n, " on %u", step_of(h, &r->dependencies[i].checkpoint));
    }
    n += n < (int)room ? snprintf(at + n, room - (size_t)n, "\n") : 0;
    assert_true(n < (int)room);
    to->used += (size_t)n;
}

void records_describe(char *out, size_t room, ckd_store *store, const char *root, unsigned first,
                      unsigned latest) {
    text to = {out, 0, room};
    history h = history_of(store, latest);
    dir_list list;
    assert_int_equal(dir_list_read(&list, path_in(root, DIR_CHUNKS).text, NULL), CKD_OK);
    assert_int_equal(list.count, latest);
    for (unsigned step = first; step <= latest; step++) {
        for (size_t i = 0; i < list.count; i++) {
            chunk *c;
            assert_int_equal(chunk_open(&c, path_of(root, DIR_CHUNKS, list.names[i]).text, NULL), CKD_OK);
            bool mine = step_of(&h, &c->records[0].tensor->checkpoint) == step;
            for (size_t k = 0; k < c->record_count && mine; k++) {
                describe_record(&to, &h, step, &c->records[k]);
            }
            chunk_close(c);
        }
    }
    dir_list_free(&list);
}

void records_check_same(const char *one, const char *several, uint32_t threads) {
    while (*one && *several) {
        size_t line = strcspn(one, "\n") + 1, other = strcspn(several, "\n") + 1;
        if (line != other || memcmp(one, several, line) != 0) {
            fail_msg("by one thread '%.*s', by %u '%.*s'", (int)line - 1, one, threads, (int)other - 1,
                     several);
        }
        one += line;
        several += other;
    }
    assert_true(!*one && !*several);
}
