/* Lists of nodes, partners, the file with the secret, and proofs of it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <sys/stat.h>

#include "base/file.h"
#include "peers/internal.h"
#include "tests/support/tempdir.h"

static void write_text(char path[600], const char *folder, const char *text) {
    snprintf(path, 600, "%s/list", folder);
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fputs(text, f);
    fclose(f);
}

static void test_lists(void **state) {
    char path[600];
    peer_hosts h;
    ckd_error err;
    write_text(path, *state,
               "# the nodes\n\nn1.example:7070 domain=r1\n [fd00::2]:7071\tdomain=r2 # the second\nn3:1\r\n");
    assert_int_equal(peer_hosts_read(&h, path, "[fd00::2]:7071", &err), CKD_OK);
    assert_int_equal(h.count, 3);
    assert_int_equal(h.self, 1);
    assert_string_equal(h.items[0].host, "n1.example");
    assert_string_equal(h.items[0].domain, "r1");
    assert_string_equal(h.items[1].host, "fd00::2");
    assert_int_equal(h.items[1].port, 7071);
    assert_string_equal(h.items[2].name, "n3:1");
    assert_string_equal(h.items[2].domain, "");
    peer_hosts_free(&h);
    assert_int_equal(peer_hosts_read(&h, "127.0.0.1:7070,192.0.2.77:7070", NULL, &err), CKD_OK);
    assert_int_equal(h.self, 0); /* the address that this machine has */
    peer_hosts_free(&h);
}

static void test_lists_with_mistakes(void **state) {
    static const struct {
        const char *text, *says;
    } cases[] = {
        {"a:1\nb\n", "entry 2: a node is HOST:PORT"},
        {"a:0\n", "entry 1: a node is HOST:PORT"},
        {"a:65536\n", "a node is HOST:PORT"},
        {"a:1x\n", "a node is HOST:PORT"},
        {":1\n", "a node is HOST:PORT"},
        {"fd00::1:7\n", "a node is HOST:PORT"},
        {"a:1 rack=2\n", "domain=NAME"},
        {"a:1 domain=\n", "domain=NAME"},
        {"a:1\na:1\n", "in the list twice"},
        {"b:1\n", "does not contain a:1"},
    };
    char path[600];
    peer_hosts h;
    ckd_error err;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        write_text(path, *state, cases[i].text);
        assert_int_equal(peer_hosts_read(&h, path, "a:1", &err), CKD_E_INVALID);
        if (!strstr(err.message, cases[i].says)) {
            fail_msg("'%s' says: %s", cases[i].text, err.message);
        }
    }
    assert_int_equal(peer_hosts_read(&h, "/nowhere/list", "a:1", &err), CKD_E_NOT_FOUND);
    assert_int_equal(peer_hosts_read(&h, "127.0.0.1:1,127.0.0.1:2", NULL, &err), CKD_E_INVALID);
    assert_non_null(strstr(err.message, "more than one"));
}

static void make(peer_hosts *h, size_t count, const char *domains) {
    *h = (peer_hosts){.items = calloc(count, sizeof(peer_host)), .count = count};
    assert_non_null(h->items);
    for (size_t i = 0; i < count; i++) {
        snprintf(h->items[i].host, sizeof(h->items[i].host), "n%zu", i);
        snprintf(h->items[i].domain, sizeof(h->items[i].domain), "%c", domains[i % strlen(domains)]);
    }
}

/* Each node keeps copies of as many others as keep copies of it, give or take the last group. */
static void test_partners(void **state) {
    (void)state;
    for (size_t count = 1; count <= 13; count++) {
        for (size_t copies = 1; copies <= 4; copies++) {
            peer_hosts h;
            size_t keeps[16] = {0};
            make(&h, count, "abcdefghijklm");
            for (size_t of = 0; of < count; of++) {
                size_t chosen[16], n = peer_hosts_partners(chosen, &h, of, copies, NULL, NULL);
                assert_int_equal(n, copies < count ? copies : count - 1);
                for (size_t i = 0; i < n; i++) {
                    assert_int_not_equal(chosen[i], of);
                    keeps[chosen[i]]++;
                    for (size_t k = 0; k < i; k++) {
                        assert_int_not_equal(chosen[i], chosen[k]);
                    }
                }
            }
            for (size_t i = 0; i < count; i++) {
                assert_int_equal(keeps[i], copies < count ? copies : count - 1);
            }
            peer_hosts_free(&h);
        }
    }
}

static void test_groups(void **state) {
    (void)state;
    peer_hosts h;
    size_t chosen[4];
    make(&h, 6, "abcdef");
    assert_int_equal(peer_hosts_partners(chosen, &h, 0, 1, NULL, NULL), 1);
    assert_int_equal(chosen[0], 1);
    assert_int_equal(peer_hosts_partners(chosen, &h, 1, 1, NULL, NULL), 1);
    assert_int_equal(chosen[0], 0); /* pairs */
    assert_int_equal(peer_hosts_partners(chosen, &h, 5, 2, NULL, NULL), 2);
    assert_true(chosen[0] == 3 && chosen[1] == 4);
    peer_hosts_free(&h);
}

static bool not_two(void *context, size_t host) {
    (void)context;
    return host != 2;
}

static void test_domains(void **state) {
    (void)state;
    peer_hosts h;
    size_t chosen[4];
    make(&h, 8, "aabb"); /* a: 0 1 4 5, b: 2 3 6 7 */
    for (size_t of = 0; of < 8; of++) {
        assert_int_equal(peer_hosts_partners(chosen, &h, of, 1, NULL, NULL), 1);
        assert_string_not_equal(h.items[chosen[0]].domain, h.items[of].domain);
        assert_int_equal(peer_hosts_partners(chosen, &h, of, 1, not_two, NULL), 1);
        assert_int_not_equal(chosen[0], 2);
        assert_string_not_equal(h.items[chosen[0]].domain, h.items[of].domain);
    }
    assert_int_equal(peer_hosts_partners(chosen, &h, 0, 2, NULL, NULL), 2); /* there is no third domain */
    assert_string_not_equal(h.items[chosen[0]].domain, "a");
    peer_hosts_free(&h);
}

static void test_secrets(void **state) {
    char path[600];
    peer_secret s;
    ckd_error err;
    write_text(path, *state, "0123456789abcdef\n");
    chmod(path, 0644);
    assert_int_equal(peer_secret_read(&s, path, &err), CKD_E_READ_ONLY);
    assert_non_null(strstr(err.message, "chmod 600"));
    chmod(path, 0600);
    assert_int_equal(peer_secret_read(&s, path, &err), CKD_OK);
    assert_int_equal(s.size, 16);
    assert_memory_equal(s.data, "0123456789abcdef", 16);
    write_text(path, *state, "too short\n");
    assert_int_equal(peer_secret_read(&s, path, &err), CKD_E_INVALID);
    assert_int_equal(s.size, 0);
    assert_int_equal(peer_secret_read(&s, "/nowhere/secret", &err), CKD_E_NOT_FOUND);
}

/*
 * Each node is in one group, of the same nodes in the same order for all of them, and of different domains if there are
 * enough.
 */
static void test_groups_of_a_size(void **state) {
    (void)state;
    enum { MOST = 24 };
    peer_host items[MOST];
    size_t group[PEER_HOSTS_MAX], other[PEER_HOSTS_MAX];
    for (size_t count = 1; count <= MOST; count++) {
        memset(items, 0, sizeof(items));
        for (size_t i = 0; i < count; i++) {
            snprintf(items[i].name, sizeof(items[i].name), "h%zu:1", i);
            snprintf(items[i].host, sizeof(items[i].host), "h%zu", i);
            snprintf(items[i].domain, sizeof(items[i].domain), "d%zu", i / 4);
        }
        const peer_hosts hosts = {.items = items, .count = count};
        for (size_t size = 1; size <= 7; size++) {
            for (size_t of = 0; of < count; of++) {
                size_t members = peer_hosts_group(group, &hosts, of, size), own = 0;
                assert_true(count < size ? members == 0 : members >= size && members < 2 * size);
                for (size_t i = 0; i < members; i++) {
                    own += group[i] == of;
                    assert_int_equal(peer_hosts_group(other, &hosts, group[i], size), members);
                    assert_memory_equal(other, group, members * sizeof(group[0]));
                    for (size_t k = 0; k < i && size <= 5 && count == 20; k++) { /* of five domains */
                        assert_string_not_equal(items[group[i]].domain, items[group[k]].domain);
                    }
                }
                assert_int_equal(own, members > 0);
            }
        }
    }
}

/* The proof is HMAC-SHA-256, here computed by another implementation, and one of another connection is of no use. */
static void test_proofs(void **state) {
    (void)state;
    static const uint8_t known[SECRET_PROOF] = {
        0xcb, 0x5e, 0xa3, 0x85, 0x30, 0xac, 0xd7, 0xac, 0xf9, 0x95, 0x96, 0xd5, 0x64, 0x6d, 0x8e, 0x67,
        0x53, 0x57, 0x2a, 0x16, 0x80, 0x4c, 0xed, 0x7b, 0xdf, 0x2e, 0xd2, 0x65, 0x67, 0x44, 0xe1, 0xf1};
    const peer_secret s = {.data = "0123456789abcdef", .size = 16};
    const peer_secret others[] = {{.data = "0123456789abcdeF", .size = 16},
                                  {.data = "0123456789abcdef0", .size = 17},
                                  {.data = "0123456789abcde", .size = 15}};
    greeting g = {.names = {[CONNECTS] = "n1:7070", [LISTENS] = "n2:7070"}};
    uint8_t proof[SECRET_PROOF];
    ckd_error err;
    if (secret_usable(&err) != CKD_OK) {
        print_message("%s\n", err.message);
        skip();
    }
    for (uint8_t i = 0; i < SECRET_NONCE; i++) {
        g.nonces[CONNECTS][i] = i;
        g.nonces[LISTENS][i] = (uint8_t)(100 + i);
    }
    assert_int_equal(secret_prove(proof, &s, &g, LISTENS, &err), CKD_OK);
    assert_memory_equal(proof, known, sizeof(known));
    assert_int_equal(secret_check(known, &s, &g, LISTENS, &err), CKD_OK);
    assert_int_equal(secret_check(known, &s, &g, CONNECTS, &err), CKD_E_READ_ONLY);
    assert_non_null(strstr(err.message, "secret"));
    for (size_t i = 0; i < sizeof(others) / sizeof(others[0]); i++) {
        assert_int_equal(secret_check(known, &others[i], &g, LISTENS, &err), CKD_E_READ_ONLY);
    }
    for (size_t i = 0; i < SECRET_PROOF; i++) {
        proof[i] ^= 0x10;
        assert_int_equal(secret_check(proof, &s, &g, LISTENS, &err), CKD_E_READ_ONLY);
        proof[i] ^= 0x10;
    }
    for (int side = CONNECTS; side <= LISTENS; side++) {
        greeting other = g;
        other.nonces[side][SECRET_NONCE - 1] ^= 1;
        assert_int_equal(secret_check(known, &s, &other, LISTENS, &err), CKD_E_READ_ONLY);
        other = g;
        other.names[side] = "n3:7070";
        assert_int_equal(secret_check(known, &s, &other, LISTENS, &err), CKD_E_READ_ONLY);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        tempdir_test(test_lists),        tempdir_test(test_lists_with_mistakes),
        cmocka_unit_test(test_partners), cmocka_unit_test(test_groups),
        cmocka_unit_test(test_domains),  tempdir_test(test_secrets),
        cmocka_unit_test(test_proofs),   cmocka_unit_test(test_groups_of_a_size),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
