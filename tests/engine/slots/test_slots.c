/* The memory that a session shares with an agent: what a reader accepts, and what it finds. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "engine/slots/slots.h"
#include "tests/support/checkpoints.h"
#include "tests/support/level.h"
#include "tests/support/tempdir.h"
#include "tests/support/xorshift.h"

#define ITEMS 6
#define LARGE (3 * SLOT_PAGE / 4 + 5) /* elements: pages of several sizes */

static const uint64_t large_shape[] = {LARGE}, small_shape[] = {3, 5};

/* A large tensor, a small one, one in two parts, a scalar, and bytes. */
static size_t make_items(slot_item *items) {
    memset(items, 0, ITEMS * sizeof(*items));
    for (size_t i = 0; i < ITEMS; i++) {
        items[i].tensor = (ckd_tensor)CKD_TENSOR_INIT;
        items[i].tensor.dtype = CKD_F32;
        items[i].tensor.ndim = i == 0 ? 1 : i == 3 ? 0 : 2;
        items[i].tensor.shape = i == 0 ? large_shape : small_shape;
        items[i].tensor.role = i == 1 ? CKD_ROLE_MASTER : CKD_ROLE_WEIGHT;
    }
    items[0].tensor.name = "large";
    items[0].bytes = LARGE * 4;
    items[1].tensor.name = "small";
    items[1].tensor.weight = "large";
    items[1].bytes = 60;
    items[2].tensor.name = "part";
    items[2].tensor.region = (ckd_region){.kind = CKD_REGION_FLAT, .count = 7};
    items[2].bytes = 28;
    items[3].tensor.name = "scalar";
    items[3].bytes = 4;
    items[4] = (slot_item){.tensor.name = "loader", .bytes = 100, .is_bytes = true};
    items[5].tensor.name = "part";
    items[5].tensor.region = (ckd_region){.kind = CKD_REGION_FLAT, .start = 7, .count = 8};
    items[5].bytes = 32;
    return ITEMS;
}

static void make_layout(slot_layout *out) {
    slot_item items[ITEMS];
    ckd_error err;
    size_t count = make_items(items);
    assert_int_equal(slot_layout_make(out, items, count, &err), CKD_OK);
}

/* The agent's slot and the trainer's view of it. */
typedef struct both {
    slot_layout layout;
    shared_slot agents, trainers;
    slot_request request;
} both;

static void open_both(both *b) {
    ckd_error err;
    memset(b, 0, sizeof(*b));
    make_layout(&b->layout);
    b->agents.layout = b->trainers.layout = &b->layout;
    assert_int_equal(shared_memory_make(&b->agents.memory, b->layout.size, HUGE_PAGES_OFF, &err), CKD_OK);
    int fd = dup(b->agents.memory.fd);
    assert_int_equal(shared_memory_map(&b->trainers.memory, fd, b->layout.size, true, &err), CKD_OK);
    for (uint64_t i = 0; i < b->layout.data_bytes; i++) {
        slot_data(&b->trainers)[i] = (uint8_t)(i * 7 + (i >> 13));
    }
    b->request.options.step = 12;
    memcpy(b->request.run, "gpt", 4);
}

static void close_both(both *b) {
    shared_memory_release(&b->trainers.memory, false);
    shared_memory_release(&b->agents.memory, false);
    slot_layout_free(&b->layout);
}

/* ---- layouts ---- */

static void test_a_layout_comes_across(void **state) {
    (void)state;
    slot_layout made, read;
    slot_item items[ITEMS];
    bytes copy = {.size = 0};
    ckd_error err;
    make_layout(&made);
    bytes_put(&copy, made.encoded.data, made.encoded.size);
    assert_int_equal(slot_layout_read(&read, &copy, &err), CKD_OK);
    assert_true(slot_layout_equal(&made, &read));
    assert_int_equal(read.size, made.size);
    size_t count = make_items(items);
    for (size_t i = 0; i < count; i++) {
        const slot_item *found = slot_layout_find(&read, &items[i], count - i);
        assert_true(found == &read.items[i]);
        assert_int_equal(found->bytes, items[i].bytes);
        assert_true(read.data_at + found->place + found->bytes <= read.size);
    }
    assert_string_equal(read.items[1].tensor.weight, "large");
    items[2].tensor.region.start = 1;
    assert_null(slot_layout_find(&read, &items[2], 2));
    items[1].tensor.dtype = CKD_I32;
    assert_null(slot_layout_find(&read, &items[1], 1));
    slot_layout_free(&read);
    slot_layout_free(&made);
}

/* Whatever the bytes say, no item lies outside the slot, and no name outside the bytes. */
static void check_inside(const slot_layout *l) {
    const uint8_t *begin = l->encoded.data, *end = begin + l->encoded.size;
    uint64_t sum = 0;
    for (size_t i = 0; i < l->count; i++) {
        const slot_item *item = &l->items[i];
        const uint8_t *name = (const uint8_t *)item->tensor.name;
        assert_true(name >= begin && name < end && memchr(name, 0, (size_t)(end - name)));
        assert_true(item->place == sum || item->place - sum < 64);
        assert_true(l->data_at + item->place + item->bytes <= l->size);
        assert_true(l->hashes_at + (item->page + (item->bytes + SLOT_PAGE - 1) / SLOT_PAGE) * 8 <=
                    l->data_at);
        sum = item->place + item->bytes;
    }
}

static void test_a_forged_layout_reads_nothing_outside(void **state) {
    (void)state;
    slot_layout made;
    make_layout(&made);
    unsigned accepted = 0;
    for (unsigned i = 0; i < 20000; i++) {
        bytes forged = {.size = 0};
        slot_layout read;
        bytes_put(&forged, made.encoded.data, made.encoded.size);
        for (unsigned k = 0; k <= i % 3; k++) {
            size_t at = (size_t)(next_random() % forged.size);
            uint64_t how = next_random();
            forged.data[at] = how & 1 ? (uint8_t)(how >> 8) : how & 2 ? 0xff : (uint8_t)(forged.data[at] + 1);
        }
        if (i % 5 == 0) {
            forged.size = (size_t)(next_random() % (forged.size + 1));
        }
        if (slot_layout_read(&read, &forged, NULL) == CKD_OK) {
            accepted++;
            check_inside(&read);
            slot_layout_free(&read);
        }
        bytes_free(&forged);
    }
    assert_true(accepted > 0);
    slot_layout_free(&made);
}

/* ---- slots ---- */

static void test_a_slot_is_good_once_it_is_published(void **state) {
    (void)state;
    both b;
    slot_content c;
    ckd_error err;
    open_both(&b);
    assert_int_equal(slot_read(&c, &b.agents, &err), CKD_E_NOT_FOUND);
    slot_publish(&b.trainers, &b.request, NULL);
    assert_int_equal(slot_read(&c, &b.agents, &err), CKD_OK);
    assert_int_equal(c.request.options.step, 12);
    assert_int_equal(slot_verify(&b.agents, &c, &err), CKD_OK);
    slot_content_free(&c);
    slot_begin(&b.trainers); /* the trainer copies the next state, and is killed in the middle */
    assert_int_equal(slot_read(&c, &b.agents, &err), CKD_E_NOT_FOUND);
    close_both(&b);
}

static void test_a_flipped_bit_is_found(void **state) {
    (void)state;
    both b;
    slot_content c;
    ckd_error err;
    open_both(&b);
    slot_publish(&b.trainers, &b.request, NULL);
    uint8_t *copy = malloc(LARGE * 4);
    for (size_t i = 0; i < b.layout.count; i++) {
        const slot_item *item = &b.layout.items[i];
        const uint64_t places[] = {0, item->bytes / 2, item->bytes - 1};
        for (size_t k = 0; k < 3; k++) {
            uint8_t *at = slot_data(&b.trainers) + item->place + places[k];
            *at ^= 0x10;
            assert_int_equal(slot_read(&c, &b.agents, &err), CKD_OK);
            assert_int_equal(slot_verify(&b.agents, &c, &err), CKD_E_CORRUPT);
            assert_string_equal(err.tensor, item->tensor.name);
            assert_int_equal(slot_copy_item(copy, &b.agents, &c, item, &err), CKD_E_CORRUPT);
            slot_content_free(&c);
            *at ^= 0x10;
        }
    }
    assert_int_equal(slot_read(&c, &b.agents, &err), CKD_OK);
    assert_int_equal(slot_copy_item(copy, &b.agents, &c, &b.layout.items[0], &err), CKD_OK);
    assert_memory_equal(copy, slot_data(&b.agents), LARGE * 4);
    slot_content_free(&c);
    /* the head: the request, the optimizers' numbers, the hashes */
    const uint64_t heads[] = {40, 500, b.layout.optimizers_at + 3, b.layout.hashes_at};
    for (size_t k = 0; k < 4; k++) {
        b.trainers.memory.at[heads[k]] ^= 0x10;
        assert_int_equal(slot_read(&c, &b.agents, &err), CKD_E_CORRUPT);
        b.trainers.memory.at[heads[k]] ^= 0x10;
    }
    free(copy);
    close_both(&b);
}

/* Returns whether a reader finds the damage. If it finds none, it gets what the writer published. */
static bool damage_is_found(const both *b, const slot_content *good, const uint8_t *values) {
    slot_content c;
    ckd_error err;
    ckd_status status = slot_read(&c, &b->agents, &err);
    if (status != CKD_OK) {
        assert_true(status == CKD_E_CORRUPT || status == CKD_E_NOT_FOUND);
        return true;
    }
    status = slot_verify(&b->agents, &c, &err);
    if (status == CKD_OK) {
        assert_memory_equal(&c.request, &good->request, sizeof(c.request));
        assert_memory_equal(c.optimizers, good->optimizers, b->layout.count * sizeof(*c.optimizers));
        assert_memory_equal(slot_data(&b->agents), values, b->layout.data_bytes);
    }
    slot_content_free(&c);
    assert_true(status == CKD_OK || status == CKD_E_CORRUPT);
    return status == CKD_E_CORRUPT;
}

/* A flipped bit of a value is always found. One of the head is found, or was in a gap or in a hint to the agent. */
static void test_any_flipped_bit_is_found(void **state) {
    (void)state;
    both b;
    slot_content good;
    unsigned in_head = 0, flips = (unsigned)test_pick(40, 1000, 10000);
    open_both(&b);
    slot_publish(&b.trainers, &b.request, NULL);
    assert_int_equal(slot_read(&good, &b.agents, NULL), CKD_OK);
    uint8_t *values = malloc(b.layout.data_bytes), *memory = b.trainers.memory.at;
    memcpy(values, slot_data(&b.agents), b.layout.data_bytes);
    for (unsigned i = 0; i < flips; i++) {
        const slot_item *item = &b.layout.items[next_random() % b.layout.count];
        bool of_head = i % 4 == 0;
        uint64_t at = of_head ? next_random() % b.layout.data_at
                              : b.layout.data_at + item->place + next_random() % item->bytes;
        uint8_t bit = (uint8_t)(1u << next_random() % 8);
        memory[at] ^= bit;
        bool found = damage_is_found(&b, &good, values);
        assert_true(found || of_head);
        in_head += found && of_head;
        memory[at] ^= bit;
    }
    assert_true(in_head > 0);
    assert_false(damage_is_found(&b, &good, values));
    slot_content_free(&good);
    free(values);
    close_both(&b);
}

/* ---- saves ---- */

static void test_a_damaged_slot_makes_no_checkpoint(void **state) {
    both b;
    slot_content c;
    ckd_error err;
    ckd_checkpoint saved;
    open_both(&b);
    ckd_store *store = store_reopen(*state, CKD_OPEN_CREATE);
    uint8_t *at = slot_data(&b.trainers) + b.layout.items[0].place + 70000;
    assert_int_equal(ckd_id_new(&b.request.options.checkpoint_id, &err), CKD_OK);
    slot_publish(&b.trainers, &b.request, NULL);
    *at ^= 1;
    assert_int_equal(slot_read(&c, &b.agents, &err), CKD_OK);
    assert_int_equal(slot_save(&saved, store, NULL, &b.agents, &c, &err), CKD_E_CORRUPT);
    assert_string_equal(err.tensor, "large");
    assert_int_equal(ckd_store_find(&saved, store, "gpt", CKD_LATEST, &err), CKD_E_NOT_FOUND);
    *at ^= 1;
    assert_int_equal(slot_save(&saved, store, NULL, &b.agents, &c, &err), CKD_OK);
    assert_int_equal(saved.step, 12);
    /* the answer was lost: the same again */
    ckd_checkpoint again;
    assert_int_equal(slot_save(&again, store, NULL, &b.agents, &c, &err), CKD_OK);
    assert_memory_equal(&again.id, &saved.id, sizeof(ckd_id));
    assert_memory_equal(&saved.id, &b.request.options.checkpoint_id, sizeof(ckd_id));
    slot_content_free(&c);
    ckd_store_close(store);
    close_both(&b);
}

/* ---- shared memory and sockets ---- */

static void test_memory_keeps_its_size(void **state) {
    (void)state;
    shared_memory made, mapped;
    ckd_error err;
    assert_int_equal(shared_memory_make(&made, 5000, HUGE_PAGES_OFF, &err), CKD_OK);
    assert_int_equal(made.size, 8192);
    assert_int_not_equal(ftruncate(made.fd, 4096), 0);
    assert_int_equal(shared_memory_map(&mapped, dup(made.fd), 8193, false, &err), CKD_E_INVALID);
    shared_memory_release(&made, false);
    int unsealed = memfd_create("unsealed", MFD_ALLOW_SEALING);
    assert_int_equal(ftruncate(unsealed, 8192), 0);
    assert_int_equal(shared_memory_map(&mapped, unsealed, 8192, false, &err), CKD_E_INVALID);
}

static void test_another_user_is_refused(void **state) {
    (void)state;
    assert_true(local_peer_allowed(1000, 1000));
    assert_false(local_peer_allowed(1001, 1000));
    assert_false(local_peer_allowed(1000, 0));
    assert_false(local_peer_allowed(0, 1000));
}

static void test_damaged_messages_are_refused(void **state) {
    (void)state;
    int ends[2];
    slot_message m;
    ckd_error err;
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
    uint8_t nonsense[16] = {1, 2, 3};
    assert_int_equal(local_send(ends[0], nonsense, sizeof(nonsense), ends, 1, &err), CKD_OK);
    assert_int_equal(slot_message_receive(&m, ends[1], &err), CKD_E_INVALID);
    slot_message sent = {.kind = SLOT_SAVE, .fd_count = 0};
    bytes_put_u32(&sent.body, 7);
    assert_int_equal(slot_message_send(ends[0], &sent, &err), CKD_OK);
    assert_int_equal(slot_message_receive(&m, ends[1], &err), CKD_OK);
    uint64_t longer;
    assert_int_equal(slot_message_get(&longer, sizeof(longer), &m, &err), CKD_E_INVALID);
    slot_message_free(&m);
    slot_message_free(&sent);
    close(ends[0]);
    assert_int_equal(slot_message_receive(&m, ends[1], &err), CKD_E_IO);
    close(ends[1]);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_layout_comes_across),
        cmocka_unit_test(test_a_forged_layout_reads_nothing_outside),
        cmocka_unit_test(test_a_slot_is_good_once_it_is_published),
        cmocka_unit_test(test_a_flipped_bit_is_found),
        cmocka_unit_test(test_any_flipped_bit_is_found),
        tempdir_test(test_a_damaged_slot_makes_no_checkpoint),
        cmocka_unit_test(test_memory_keeps_its_size),
        cmocka_unit_test(test_another_user_is_refused),
        cmocka_unit_test(test_damaged_messages_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
