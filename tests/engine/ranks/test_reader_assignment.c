/*
 * Assignment of readers in collective loads: a payload that several ranks need has one reader, which sends it to the
 * others. Reading is divided evenly.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "engine/decode/load_plan.h"
#include "engine/ranks/collective.h"
#include "tests/support/xorshift.h"

enum { WORLD = 9, PAYLOADS = 700 };

/* What each rank lists, and the replies that it gets. */
typedef struct scene {
    uint32_t world;
    bytes lists[WORLD], replies[WORLD];
    uint32_t of[WORLD][PAYLOADS]; /* the payload of each entry */
    uint32_t entries[WORLD];
    bool needs[WORLD][PAYLOADS];
    uint32_t turn[WORLD][PAYLOADS];
    uint64_t size[PAYLOADS];
} scene;

static hash128 id_of(uint32_t payload) {
    return hash128_of(&payload, sizeof(payload));
}

static scene *scene_new(uint32_t world, unsigned share) {
    scene *s = calloc(1, sizeof(*s));
    assert_non_null(s);
    s->world = world;
    for (uint32_t p = 0; p < PAYLOADS; p++) {
        s->size[p] = 1 + next_random() % 100000;
        for (uint32_t r = 0; r < world; r++) {
            s->needs[r][p] = next_random() % 100 < share;
            s->turn[r][p] = (uint32_t)(next_random() % 50);
        }
    }
    for (uint32_t r = 0; r < world; r++) {
        for (uint32_t k = 0; k < PAYLOADS; k++) {
            uint32_t p = (k * 37 + r * 11) % PAYLOADS; /* in a different order on each rank */
            if (s->needs[r][p]) {
                hash128 id = id_of(p);
                reader_list_add(&s->lists[r], &id, s->size[p], s->turn[r][p]);
                s->of[r][s->entries[r]++] = p;
            }
        }
    }
    return s;
}

static ckd_status scene_meet(scene *s) {
    ckd_bytes lists[WORLD];
    for (uint32_t r = 0; r < s->world; r++) {
        lists[r] = (ckd_bytes){s->lists[r].data, s->lists[r].size};
    }
    return assign_readers(s->replies, lists, s->world, NULL);
}

static void scene_free(scene *s) {
    for (uint32_t r = 0; r < s->world; r++) {
        bytes_free(&s->lists[r]);
        bytes_free(&s->replies[r]);
    }
    free(s);
}

typedef struct found {
    uint32_t replies, reader, receivers;
    bool receives[WORLD];
    uint64_t place;
} found;

static void read_replies(found *all, const scene *s) {
    for (uint32_t r = 0; r < s->world; r++) {
        reader at = reader_of(s->replies[r].data, s->replies[r].size);
        reader_reply reply;
        while (reader_reply_next(&reply, &at, s->world)) {
            assert_in_range(reply.index, 0, s->entries[r] - 1);
            found *f = &all[s->of[r][reply.index]];
            assert_true(f->replies == 0 || f->place == reply.position);
            f->place = reply.position;
            f->replies++;
            if (reply.receiver_count) {
                assert_int_equal(f->receivers, 0); /* there is only one reader */
                f->reader = r;
                f->receivers = reply.receiver_count;
            }
            for (uint32_t i = 0; i < reply.receiver_count; i++) {
                uint32_t to = load_le32(reply.receivers + 4 * (size_t)i);
                assert_in_range(to, 0, s->world - 1);
                assert_false(f->receives[to]);
                f->receives[to] = true;
            }
        }
        assert_false(at.failed);
    }
}

static void check_scene(const scene *s, const found *all) {
    uint64_t loads[WORLD] = {0}, sum = 0, largest = 0, most = 0;
    for (uint32_t p = 0; p < PAYLOADS; p++) {
        uint32_t needed = 0, turn = UINT32_MAX, only = 0;
        for (uint32_t r = 0; r < s->world; r++) {
            needed += s->needs[r][p];
            turn = s->needs[r][p] && s->turn[r][p] < turn ? s->turn[r][p] : turn;
            only = s->needs[r][p] ? r : only;
        }
        assert_int_equal(all[p].replies, needed > 1 ? needed : 0);
        if (needed > 1) {
            assert_int_equal(all[p].place >> 32, turn + 1);
            for (uint32_t r = 0; r < s->world; r++) {
                assert_int_equal(all[p].receives[r], s->needs[r][p] && r != all[p].reader);
            }
            assert_true(s->needs[all[p].reader][p]);
        }
        loads[needed > 1 ? all[p].reader : only] += needed ? s->size[p] : 0;
        sum += needed ? s->size[p] : 0;
        largest = s->size[p] > largest ? s->size[p] : largest;
    }
    for (uint32_t r = 0; r < s->world; r++) {
        most = loads[r] > most ? loads[r] : most;
    }
    assert_true(most <= sum / s->world + largest);
}

static void test_random_needs(void **state) {
    (void)state;
    for (uint32_t world = 1; world <= WORLD; world += 2) {
        for (unsigned share = 40; share <= 100; share += 20) {
            scene *s = scene_new(world, share);
            found *all = calloc(PAYLOADS, sizeof(*all));
            assert_int_equal(scene_meet(s), CKD_OK);
            read_replies(all, s);
            check_scene(s, all);
            free(all);
            scene_free(s);
        }
    }
}

/* One rank needs far more than the others, so it reads nothing for them. */
static void test_busy_ranks_read_for_nobody(void **state) {
    (void)state;
    bytes lists[3] = {{0}}, replies[3] = {{0}};
    for (uint32_t p = 0; p < 20; p++) {
        hash128 id = id_of(p);
        for (uint32_t r = 0; r < 3; r++) {
            reader_list_add(&lists[r], &id, 100, 0);
        }
    }
    hash128 alone = id_of(99);
    reader_list_add(&lists[1], &alone, 100000, 0);
    ckd_bytes in[3];
    for (uint32_t r = 0; r < 3; r++) {
        in[r] = (ckd_bytes){lists[r].data, lists[r].size};
    }
    assert_int_equal(assign_readers(replies, in, 3, NULL), CKD_OK);
    uint32_t reads[3] = {0};
    for (uint32_t r = 0; r < 3; r++) {
        reader at = reader_of(replies[r].data, replies[r].size);
        reader_reply reply;
        while (reader_reply_next(&reply, &at, 3)) {
            reads[r] += reply.receiver_count > 0;
        }
        bytes_free(&lists[r]);
        bytes_free(&replies[r]);
    }
    assert_int_equal(reads[0], 10);
    assert_int_equal(reads[1], 0);
    assert_int_equal(reads[2], 10);
}

static void test_invalid_messages(void **state) {
    (void)state;
    uint8_t data[READER_ENTRY + 1] = {0};
    bytes replies[2] = {{0}};
    ckd_bytes in[2] = {{data, sizeof(data)}, {data, READER_ENTRY}};
    assert_int_equal(assign_readers(replies, in, 2, NULL), CKD_E_CORRUPT);
    bytes reply = {0};
    for (unsigned wrong = 0; wrong < 5; wrong++) {
        bytes_clear(&reply);
        bytes_put_u32(&reply, 7);
        bytes_put_u64(&reply, wrong == 1 ? COLLECTIVE_MIN - 1 : COLLECTIVE_MIN);
        bytes_put_u32(&reply, wrong == 2 ? 3 : 2);
        bytes_put_u32(&reply, 0);
        bytes_put_u32(&reply, wrong == 3 ? 3 : 2);
        reader at = reader_of(reply.data, reply.size - (wrong == 4));
        reader_reply got;
        assert_int_equal(reader_reply_next(&got, &at, 3), wrong == 0);
        assert_int_equal(at.failed, wrong != 0);
        if (wrong == 0) {
            assert_int_equal(got.index, 7);
            assert_false(reader_reply_next(&got, &at, 3));
            assert_false(at.failed);
        }
    }
    bytes_free(&reply);
}

/* A position within a turn means that this turn is not complete. */
static void test_turns(void **state) {
    (void)state;
    assert_int_equal(complete_turns(UINT64_C(1) << 32), 0);
    assert_int_equal(complete_turns(UINT64_C(6) << 32 | 17), 5);
    assert_int_equal(complete_turns(UINT64_C(6) << 32 | UINT32_MAX), 6);
    assert_true(complete_turns(UINT64_MAX) == UINT64_MAX);
}

/* ---- payloads kept in memory ---- */

/* A payload is freed once its last turn is complete, or earlier if the payloads exceed the limit. */
static void test_payloads_are_freed(void **state) {
    (void)state;
    record records[6];
    load_node nodes[6];
    memset(records, 0, sizeof(records));
    memset(nodes, 0, sizeof(nodes));
    size_t table[16];
    load_plan plan = {.nodes = nodes, .node_count = 6, .table = table, .table_size = 16};
    for (size_t i = 0; i < 16; i++) {
        table[i] = LOAD_NONE;
    }
    static const uint32_t last[6] = {9, 3, 5, 3, 7, 6};
    payloads p;
    for (size_t i = 0; i < 6; i++) {
        records[i].stored_size = 100;
        nodes[i].record = &records[i];
        nodes[i].last = last[i];
    }
    assert_int_equal(payloads_init(&p, &plan, NULL), CKD_OK);
    for (size_t i = 0; i < 6; i++) {
        payloads_add(&p, i, malloc(100));
    }
    payloads_trim(&p, 4, 1000); /* turns 0 to 3 are complete */
    static const bool then[6] = {true, false, true, false, true, true};
    for (size_t i = 0; i < 6; i++) {
        assert_int_equal(p.data[i] != NULL, then[i]);
    }
    assert_int_equal(p.bytes, 400);
    payloads_trim(&p, 4, 250); /* those that are needed last are freed */
    static const bool now[6] = {false, false, true, false, false, true};
    for (size_t i = 0; i < 6; i++) {
        assert_int_equal(p.data[i] != NULL, now[i]);
    }
    assert_int_equal(p.bytes, 200);
    payloads_trim(&p, UINT64_MAX, 1000);
    assert_int_equal(p.bytes, 0);
    payloads_free(&p);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random_needs),       cmocka_unit_test(test_busy_ranks_read_for_nobody),
        cmocka_unit_test(test_invalid_messages),   cmocka_unit_test(test_turns),
        cmocka_unit_test(test_payloads_are_freed),
    };
    return cmocka_run_group_tests_name("together_meet", tests, NULL, NULL);
}
