/* Nodes as processes that are killed, stopped and damaged: calls end with an error, and no damage passes. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <limits.h>
#include <arpa/inet.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/file.h"
#include "base/local_socket.h"
#include "peers/internal.h"
#include "tests/support/level.h"
#include "tests/support/scenes.h"
#include "tests/support/tempdir.h"
#include "tests/support/xorshift.h"

#define NODES      4
#define SILENCE_MS 1500
#define BUDGET     (UINT64_C(16) << 20)
#define BLOB       "data/c/one.ckd"
#define BLOB_BYTES (5 * (size_t)PEER_PACKET / 2)

static peer_hosts hosts;
static peer_secret secret = {.data = "a secret of the test", .size = 20};
static char folder[512];
static pid_t processes[NODES];
static peer_node *node;

static void must(ckd_status status, const ckd_error *err) {
    if (status != CKD_OK) {
        print_error("%s\n", err->message);
    }
    assert_int_equal(status, CKD_OK);
}

/* ---- nodes ---- */

static uint16_t free_port(int *fd) {
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof(at);
    *fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(bind(*fd, (struct sockaddr *)&at, size), 0);
    assert_int_equal(getsockname(*fd, (struct sockaddr *)&at, &size), 0);
    return ntohs(at.sin_port);
}

static char nodes_list[512]; /* of all nodes */

static void choose_ports(void) {
    int fds[NODES];
    char self[64] = "";
    ckd_error err;
    nodes_list[0] = '\0';
    for (int i = 0; i < NODES; i++) {
        char one[64];
        snprintf(one, sizeof(one), "127.0.0.1:%u", (unsigned)free_port(&fds[i]));
        snprintf(nodes_list + strlen(nodes_list), sizeof(nodes_list) - strlen(nodes_list), "%s%s",
                 i ? "," : "", one);
        if (i == 0) {
            snprintf(self, sizeof(self), "%s", one);
        }
    }
    for (int i = 0; i < NODES; i++) {
        close(fds[i]);
    }
    must(peer_hosts_read(&hosts, nodes_list, self, &err), &err);
}

/* Says how many nodes this one sees, then what it was asked. */
static ckd_status answer_question(void *context, bytes *answer, const bytes *question, ckd_error *err) {
    peer_node **of = context;
    if (question->size == 5 && memcmp(question->data, "wrong", 5) == 0) {
        return err_set(err, CKD_E_NOT_FOUND, "this is wrong");
    }
    while (question->size == 4 && memcmp(question->data, "hang", 4) == 0) {
        pause();
    }
    if (question->size == 2 && question->data[0] == '!') {
        return err_set(err, (ckd_status)question->data[1], "a status");
    }
    uint8_t seen = 0;
    for (size_t i = 0; i < NODES; i++) {
        seen = (uint8_t)(seen + peer_alive(*of, i));
    }
    bytes_put_u8(answer, seen);
    bytes_put(answer, question->data, question->size);
    return CKD_OK;
}

static ckd_status begin_node(peer_node **out, size_t self, uint64_t bytes_per_s, ckd_error *err) {
    static char own[600];
    hosts.self = self;
    snprintf(own, sizeof(own), "%s/node%zu", folder, self);
    return peer_node_begin(out,
                           &(peer_options){.hosts = &hosts,
                                           .secret = &secret,
                                           .folder = own,
                                           .budget_bytes = BUDGET,
                                           .bytes_per_s = bytes_per_s,
                                           .silence_ms = SILENCE_MS,
                                           .answer = answer_question,
                                           .context = out},
                           err);
}

#define READY_FD 3

/* The program of another node: node SELF LIST FOLDER. */
static int run_node(char **argv) {
    static peer_node *own;
    ckd_error err;
    size_t self = (size_t)atoi(argv[2]);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    snprintf(folder, sizeof(folder), "%s", argv[4]);
    ckd_status status = peer_hosts_read(&hosts, argv[3], strtok(strdup(argv[3]), ","), &err);
    THEN(status, begin_node(&own, self, 0, &err));
    if (status != CKD_OK || write(READY_FD, "r", 1) != 1) {
        fprintf(stderr, "node %zu: %s\n", self, err.message);
        return 1;
    }
    for (;;) {
        pause();
    }
}

static void start_process(size_t self) {
    int ends[2];
    char byte;
    assert_int_equal(pipe(ends), 0);
    processes[self] = fork();
    assert_true(processes[self] >= 0);
    if (processes[self] == 0) { /* a program of its own: UCX does not survive a fork */
        char number[8];
        snprintf(number, sizeof(number), "%zu", self);
        dup2(ends[1], READY_FD);
        close_range(READY_FD + 1, ~0u, 0);
        execl("/proc/self/exe", "test_peers", "node", number, nodes_list, folder, (char *)NULL);
        _exit(1);
    }
    close(ends[1]);
    assert_int_equal(read(ends[0], &byte, 1), 1);
    close(ends[0]);
}

static void end_process(size_t self) {
    if (processes[self] > 0) {
        kill(processes[self], SIGKILL);
        kill(processes[self], SIGCONT);
        waitpid(processes[self], NULL, 0);
        processes[self] = 0;
    }
}

/* The signal alone is not enough: threads of a process go on until one of them has seen it. */
static void stop_process(size_t self) {
    int status;
    kill(processes[self], SIGSTOP);
    assert_int_equal(waitpid(processes[self], &status, WUNTRACED), processes[self]);
    assert_true(WIFSTOPPED(status));
}

static void await_alive(size_t host, bool alive) {
    while (peer_alive(node, host) != alive) { /* the runner's time limit ends it */
        clock_sleep_ns(10000000);
    }
}

/* Three processes; this one is node 0. */
static int set_up(void **state) {
    ckd_error err;
    *state = tempdir_create();
    snprintf(folder, sizeof(folder), "%s", (const char *)*state);
    setenv("UCX_LOG_LEVEL", "fatal", 0);
    choose_ports();
    for (size_t i = 1; i < NODES; i++) {
        start_process(i);
    }
    must(begin_node(&node, 0, 0, &err), &err);
    peer_node_await_first_look(node);
    for (size_t i = 1; i < NODES; i++) {
        await_alive(i, true);
    }
    return 0;
}

static int tear_down(void **state) {
    wire_set_fault(NULL, NULL);
    peer_node_end(node);
    node = NULL;
    for (size_t i = 1; i < NODES; i++) {
        end_process(i);
    }
    peer_hosts_free(&hosts);
    tempdir_remove(*state);
    return 0;
}

/* ---- files ---- */

static void write_file(char path[600], const char *name, size_t size, unsigned which) {
    bytes data = {.size = 0};
    ckd_error err;
    uint64_t x = which + 1;
    for (size_t i = 0; i < size; i++) {
        x = x * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        bytes_put_u8(&data, (uint8_t)(x >> 56));
    }
    snprintf(path, 600, "%s/%s", folder, name);
    (void)file_remove(path, true, NULL);
    file_writer *f;
    must(file_create(&f, path, 0, &err), &err);
    must(file_append(f, data.data, data.size, &err), &err);
    must(file_close(f, &err), &err);
    bytes_free(&data);
}

static void check_same(const char *a, const char *b) {
    bytes x = {.size = 0}, y = {.size = 0};
    ckd_error err;
    must(file_read_all(&x, a, 64u << 20, &err), &err);
    must(file_read_all(&y, b, 64u << 20, &err), &err);
    assert_int_equal(x.size, y.size);
    assert_memory_equal(x.data, y.data, x.size);
    bytes_free(&x);
    bytes_free(&y);
}

static void flip_byte(const char *path, uint64_t at) {
    FILE *f = fopen(path, "r+");
    assert_non_null(f);
    fseek(f, (long)at, SEEK_SET);
    int c = fgetc(f);
    fseek(f, (long)at, SEEK_SET);
    fputc(c ^ 4, f);
    fclose(f);
}

/* ---- tests ---- */

static void test_blobs_travel_and_come_back(void **state) {
    (void)state;
    char path[600], back[600];
    uint64_t sent;
    ckd_error err;
    blob_list list;
    write_file(path, "one", BLOB_BYTES, 1);
    snprintf(back, sizeof(back), "%s/back", folder);
    for (size_t i = 1; i < NODES; i++) {
        must(peer_put(&sent, node, i, &(peer_copy){"node0", BLOB, path, NULL}, &err), &err);
        assert_int_equal(sent, BLOB_BYTES);
        must(peer_put(&sent, node, i, &(peer_copy){"node0", BLOB, path, NULL}, &err), &err);
        assert_int_equal(sent, 0); /* it has it */
        must(peer_list(&list, node, i, "node0", &err), &err);
        assert_int_equal(list.count, 1);
        assert_string_equal(list.items[0].name, BLOB);
        assert_int_equal(list.items[0].size, BLOB_BYTES);
        blob_list_free(&list);
        must(peer_list(&list, node, i, "node7", &err), &err);
        assert_int_equal(list.count, 0);
        blob_list_free(&list);
        must(peer_fetch(node, i, "node0", BLOB, back, &err), &err);
        check_same(path, back);
        assert_int_equal(peer_fetch(node, i, "node0", BLOB, back, &err), CKD_E_EXISTS);
        must(file_remove(back, false, &err), &err);
        must(peer_delete(node, i, "node0", BLOB, &err), &err);
        assert_int_equal(peer_fetch(node, i, "node0", BLOB, back, &err), CKD_E_NOT_FOUND);
        assert_false(file_exists(back));
    }
    write_file(path, "empty", 0, 1);
    must(peer_put(&sent, node, 1, &(peer_copy){"node0", "data/store", path, NULL}, &err), &err);
    must(peer_fetch(node, 1, "node0", "data/store", back, &err), &err);
    assert_int_equal(file_bytes(back), 0);
}

/* Parts of a file travel as blobs; a file of this node's own becomes one. */
static void test_parts_and_own_files(void **state) {
    (void)state;
    char path[600], back[600], held[700], name[16];
    uint64_t sent, before = peer_held_bytes(node);
    ckd_error err;
    static const peer_range ranges[] = {
        {0, 1}, {1, 2500000}, {2500001, BLOB_BYTES - 2500001}, {BLOB_BYTES, 0}};
    bytes whole = {.size = 0};
    write_file(path, "one", BLOB_BYTES, 1);
    snprintf(back, sizeof(back), "%s/back", folder);
    for (size_t i = 0; i < sizeof(ranges) / sizeof(ranges[0]); i++) {
        bytes part = {.size = 0};
        snprintf(name, sizeof(name), "part%zu", i);
        must(peer_put(&sent, node, 1, &(peer_copy){"node0", name, path, &ranges[i]}, &err), &err);
        assert_int_equal(sent, ranges[i].size);
        must(peer_fetch(node, 1, "node0", name, back, &err), &err);
        must(file_read_all(&part, back, BLOB_BYTES, &err), &err);
        bytes_put(&whole, part.data, part.size);
        bytes_free(&part);
        must(file_remove(back, false, &err), &err);
    }
    bytes all = {.size = 0};
    must(file_read_all(&all, path, BLOB_BYTES, &err), &err);
    assert_int_equal(whole.size, all.size);
    assert_memory_equal(whole.data, all.data, all.size);
    bytes_free(&whole);
    bytes_free(&all);
    const peer_range outside = {BLOB_BYTES - 5, 6};
    assert_int_equal(peer_put(&sent, node, 1, &(peer_copy){"node0", "x", path, &outside}, &err),
                     CKD_E_CORRUPT);
    must(peer_keep(node, "own", "data/a", path, &err), &err);
    assert_false(file_exists(path));
    assert_int_equal(peer_held_bytes(node), before + BLOB_BYTES);
    must(peer_held_file(held, sizeof(held), node, "own", "data/a", &err), &err);
    assert_int_equal(file_bytes(held), BLOB_BYTES);
    flip_byte(held, BLOB_BYTES / 2);
    assert_int_equal(peer_held_file(held, sizeof(held), node, "own", "data/a", &err), CKD_E_CORRUPT);
    write_file(path, "two", BLOB_BYTES / 2, 2);
    must(peer_keep(node, "own", "data/a", path, &err), &err); /* in the place of the old one */
    assert_int_equal(peer_held_bytes(node), before + BLOB_BYTES / 2);
    must(peer_held_remove(node, "own", "data/a", &err), &err);
    assert_int_equal(peer_held_file(held, sizeof(held), node, "own", "data/a", &err), CKD_E_NOT_FOUND);
    assert_int_equal(peer_held_bytes(node), before);
    const char *const names[] = {"in/one", "in/two/three", "inner/one"};
    for (size_t i = 0; i < 3; i++) {
        write_file(path, "small", 100, 1);
        must(peer_keep(node, "own", names[i], path, &err), &err);
    }
    peer_held_remove_below(node, "own", "in");
    assert_int_equal(peer_held_bytes(node), before + 100);
    must(peer_held_file(held, sizeof(held), node, "own", "inner/one", &err), &err);
    must(peer_held_remove(node, "own", "inner/one", &err), &err);
    write_file(path, "large", BUDGET + 1, 1);
    assert_int_equal(peer_keep(node, "own", "data/a", path, &err), CKD_E_NOSPACE);
    assert_false(file_exists(path));
    assert_int_equal(peer_held_bytes(node), before);
}

/* Whatever removes or cuts a file of a kept copy: the copy counts no more, and can be sent again. */
static void test_kept_files_that_vanish(void **state) {
    (void)state;
    char path[600], back[600], kept[700];
    uint64_t sent;
    ckd_error err;
    blob_list list;
    write_file(path, "one", BUDGET / 2 + 1, 1);
    snprintf(back, sizeof(back), "%s/back", folder);
    snprintf(kept, sizeof(kept), "%s/node1/node0/" BLOB, folder);
    for (unsigned i = 0; i < 3; i++) {
        must(peer_put(&sent, node, 1, &(peer_copy){"node0", BLOB, path, NULL}, &err), &err);
        assert_int_equal(sent, BUDGET / 2 + 1); /* what has vanished takes no room */
        if (i == 0) {
            assert_int_equal(truncate(kept, 100), 0);
        } else if (i == 1) {
            assert_int_equal(unlink(kept), 0);
        } else {
            *strstr(kept, "/node0") = '\0';
            peer_remove_below(kept, 9);
        }
        must(peer_list(&list, node, 1, "node0", &err), &err);
        assert_int_equal(list.count, 0);
        blob_list_free(&list);
    }
    must(dir_remove(kept, &err), &err);
    must(peer_put(&sent, node, 1, &(peer_copy){"node0", BLOB, path, NULL}, &err), &err);
    assert_int_equal(sent, BUDGET / 2 + 1);
    must(peer_fetch(node, 1, "node0", BLOB, back, &err), &err);
    check_same(path, back);
    snprintf(kept, sizeof(kept), "%s/node1/node0/" BLOB, folder);
    assert_int_equal(unlink(kept), 0); /* nobody has listed it meanwhile */
    must(peer_put(&sent, node, 1, &(peer_copy){"node0", BLOB, path, NULL}, &err), &err);
    assert_int_equal(sent, BUDGET / 2 + 1);
}

static void test_a_budget_and_names(void **state) {
    (void)state;
    char path[600];
    uint64_t sent;
    ckd_error err;
    static const char *const bad[] = {"../x", "/x", "data//x", ".x", "data/.tmp-x", "a/", "a b"};
    write_file(path, "large", BUDGET + 1, 1);
    assert_int_equal(peer_put(&sent, node, 1, &(peer_copy){"node0", BLOB, path, NULL}, &err), CKD_E_NOSPACE);
    write_file(path, "small", BUDGET / 2 + 1, 1);
    must(peer_put(&sent, node, 1, &(peer_copy){"node0", "a", path, NULL}, &err), &err);
    assert_int_equal(peer_put(&sent, node, 1, &(peer_copy){"node0", "b", path, NULL}, &err), CKD_E_NOSPACE);
    must(peer_delete(node, 1, "node0", "", &err), &err);
    must(peer_put(&sent, node, 1, &(peer_copy){"node0", "b", path, NULL}, &err), &err);
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        assert_int_equal(peer_put(&sent, node, 1, &(peer_copy){"node0", bad[i], path, NULL}, &err),
                         CKD_E_INVALID);
        assert_int_equal(peer_put(&sent, node, 1, &(peer_copy){bad[i], "a", path, NULL}, &err),
                         CKD_E_INVALID);
    }
    must(peer_put(&sent, node, 1, &(peer_copy){"node0", "b", path, NULL}, &err),
         &err); /* the connection goes on */
    assert_int_equal(sent, 0);
}

static void test_questions(void **state) {
    (void)state;
    ckd_status (*const ways[])(bytes *, peer_node *, size_t, const bytes *, bool,
                               ckd_error *) = {peer_ask, peer_ask_in_turn, peer_ask_in_turn};
    ckd_error err;
    blob_list list;
    for (size_t i = 0; i < sizeof(ways) / sizeof(ways[0]); i++) {
        bytes question = {.size = 0}, answer = {.size = 0};
        bytes_put(&question, "hello", 5);
        must(ways[i](&answer, node, 2, &question, false, &err), &err);
        assert_int_equal(answer.size, 6);
        assert_true(answer.data[0] >= 2 && answer.data[0] <= NODES);
        assert_memory_equal(answer.data + 1, "hello", 5);
        bytes_clear(&question);
        bytes_put(&question, "wrong", 5);
        assert_int_equal(ways[i](&answer, node, 2, &question, i > 1, &err), CKD_E_NOT_FOUND);
        assert_non_null(strstr(err.message, "this is wrong"));
        assert_non_null(strstr(err.message, hosts.items[2].name));
        bytes_free(&question);
        bytes_free(&answer);
        must(peer_list(&list, node, 2, "node0", &err), &err); /* the connection goes on */
        blob_list_free(&list);
    }
}

typedef struct asking {
    peer_node *from;
    bool takes_long;
    ckd_status status;
} asking;

static void *ask_what_hangs(void *context) {
    asking *a = context;
    bytes answer = {.size = 0}, question = {.size = 0};
    bytes_put(&question, "hang", 4);
    do { /* a busy machine may be silent for too long */
        while (!peer_alive(a->from, 2)) {
            clock_sleep_ns(10000000);
        }
        a->status = peer_ask(&answer, a->from, 2, &question, a->takes_long, NULL);
    } while (!a->takes_long && a->status == CKD_E_IO);
    bytes_free(&question);
    bytes_free(&answer);
    return NULL;
}

/* The thread that answers hangs, as in a file system that does not come back, while another one shows signs of life. */
static void test_answers_that_do_not_come(void **state) {
    (void)state;
    peer_hosts all = hosts;
    peer_options o = {.hosts = &all, .secret = &secret, .budget_bytes = BUDGET, .silence_ms = 200};
    char own[600];
    asking quick = {.takes_long = false}, slow = {.takes_long = true};
    pthread_t thread;
    ckd_error err;
    end_process(1); /* this process plays it */
    snprintf(own, sizeof(own), "%s/second", folder);
    all.self = 1;
    o.folder = own;
    must(peer_node_begin(&quick.from, &o, &err), &err);
    slow.from = quick.from;
    assert_int_equal(pthread_create(&thread, NULL, ask_what_hangs, &slow), 0);
    (void)ask_what_hangs(&quick);
    assert_int_equal(quick.status, CKD_E_BUSY);
    peer_node_hurry(slow.from);
    pthread_join(thread, NULL);
    assert_int_equal(slow.status, CKD_E_IO);
    peer_node_end(slow.from);
}

/* Whoever only opens connections, from one address, keeps out nobody at another one. */
static void test_many_strangers(void **state) {
    (void)state;
    enum { STRANGERS = STRANGERS_MAX + 20 };
    int fds[STRANGERS];
    char path[600], back[600];
    uint64_t sent;
    ckd_error err;
    struct sockaddr_in from = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK + 1)},
                       to = from;
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    to.sin_port = htons(hosts.items[1].port);
    for (int i = 0; i < STRANGERS; i++) {
        fds[i] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        assert_int_equal(bind(fds[i], (struct sockaddr *)&from, sizeof(from)), 0);
        assert_int_equal(connect(fds[i], (struct sockaddr *)&to, sizeof(to)), 0);
    }
    write_file(path, "one", BLOB_BYTES, 1);
    snprintf(back, sizeof(back), "%s/back", folder);
    must(peer_put(&sent, node, 1, &(peer_copy){"node0", BLOB, path, NULL}, &err), &err);
    must(peer_fetch(node, 1, "node0", BLOB, back, &err), &err);
    check_same(path, back);
    for (int i = 0; i < STRANGERS; i++) {
        close(fds[i]);
    }
}

/* A node that was killed is gone at once, one that is stopped after a while; another one takes over their addresses. */
static void test_killed_and_stopped_nodes(void **state) {
    (void)state;
    char path[600], back[600];
    uint64_t sent;
    ckd_error err;
    write_file(path, "one", BLOB_BYTES, 1);
    snprintf(back, sizeof(back), "%s/back", folder);
    for (size_t i = 1; i < NODES; i++) {
        must(peer_put(&sent, node, i, &(peer_copy){"node0", BLOB, path, NULL}, &err), &err);
    }
    end_process(1);
    stop_process(2);
    assert_int_not_equal(peer_fetch(node, 1, "node0", BLOB, back, &err), CKD_OK);
    assert_int_not_equal(peer_fetch(node, 2, "node0", BLOB, back, &err), CKD_OK);
    await_alive(1, false);
    await_alive(2, false);
    assert_int_equal(peer_put(&sent, node, 2, &(peer_copy){"node0", "other", path, NULL}, &err), CKD_E_IO);
    assert_true(peer_alive(node, 3));
    must(peer_fetch(node, 3, "node0", BLOB, back, &err), &err);
    check_same(path, back);
    must(file_remove(back, false, &err), &err);
    kill(processes[2], SIGCONT);
    start_process(1);
    await_alive(2, true);
    await_alive(1, true);
    must(peer_fetch(node, 2, "node0", BLOB, back, &err), &err);
    assert_int_equal(peer_fetch(node, 1, "node0", BLOB, path, &err),
                     CKD_E_NOT_FOUND); /* its memory was lost */
}

/* Nodes are killed while bytes travel. */
static void test_kills_during_transfers(void **state) {
    (void)state;
    char path[600];
    ckd_error err;
    write_file(path, "one", BLOB_BYTES, 1);
    for (unsigned i = 0; i < 4; i++) {
        pid_t killer = fork();
        if (killer == 0) {
            clock_sleep_ns(i * UINT64_C(2000000));
            kill(processes[1], SIGKILL);
            _exit(0);
        }
        ckd_status status = CKD_OK;
        for (unsigned k = 0; status == CKD_OK; k++) {
            char name[32];
            uint64_t sent;
            snprintf(name, sizeof(name), "blob%u", k % 4);
            (void)peer_delete(node, 1, "node0", name, NULL);
            status = peer_put(&sent, node, 1, &(peer_copy){"node0", name, path, NULL}, &err);
        }
        assert_true(status == CKD_E_IO || status == CKD_E_BUSY);
        waitpid(killer, NULL, 0);
        end_process(1);
        await_alive(1, false);
        start_process(1);
        await_alive(1, true);
    }
}

typedef struct flips {
    size_t countdown;
    bool done;
} flips;

/* Flips a bit of the byte that the countdown reaches. */
static void flip(void *context, void *data, size_t size) {
    flips *f = context;
    if (!f->done && f->countdown < size) {
        ((uint8_t *)data)[f->countdown] ^= 16;
        f->done = true;
    }
    f->countdown -= f->done ? 0 : size;
}

/* Every flipped bit is found, by whoever receives it. */
static void test_bits_that_flip_on_their_way(void **state) {
    (void)state;
    char path[600], back[600];
    uint64_t sent;
    ckd_error err;
    write_file(path, "one", BLOB_BYTES, 1);
    snprintf(back, sizeof(back), "%s/back", folder);
    must(peer_put(&sent, node, 1, &(peer_copy){"node0", BLOB, path, NULL}, &err), &err);
    for (size_t at = 0; at < BLOB_BYTES + 200; at += at < 200 ? 7 : 400000) {
        flips f = {.done = false};
        while (!f.done) { /* a busy machine may be silent for so long that a fetch ends before the flip */
            f.countdown = at;
            wire_set_fault(flip, &f); /* signs of life are hit, too */
            ckd_status status = peer_fetch(node, 1, "node0", BLOB, back, &err);
            wire_set_fault(NULL, NULL);
            if (status == CKD_OK) {
                check_same(path, back);
                must(file_remove(back, false, &err), &err);
            } else {
                assert_false(file_exists(back));
            }
            await_alive(1, true);
        }
    }
}

/* A node that receives damaged bytes says so, and keeps nothing of them. */
static void test_bits_that_flip_in_a_sent_copy(void **state) {
    (void)state;
    peer_node *second;
    char path[600];
    uint64_t sent;
    ckd_error err;
    blob_list list;
    unsigned damaged = 0;
    end_process(1); /* this process plays both */
    peer_hosts both = hosts;
    peer_options o = {.hosts = &both, .secret = &secret, .budget_bytes = BUDGET, .silence_ms = 20000};
    char own[600];
    snprintf(own, sizeof(own), "%s/second", folder);
    both.self = 1;
    o.folder = own;
    must(peer_node_begin(&second, &o, &err), &err);
    await_alive(1, true);
    write_file(path, "one", BLOB_BYTES, 1);
    for (size_t at = 0; at < BLOB_BYTES; at += 350000) {
        flips f = {.countdown = at};
        wire_set_fault(flip, &f);
        ckd_status status = peer_put(&sent, node, 1, &(peer_copy){"node0", BLOB, path, NULL}, &err);
        wire_set_fault(NULL, NULL);
        await_alive(1, true);
        damaged += status != CKD_OK;
        if (status != CKD_OK) {
            must(peer_list(&list, node, 1, "node0", &err), &err);
            assert_int_equal(list.count, 0);
            blob_list_free(&list);
        } else {
            char kept[700];
            snprintf(kept, sizeof(kept), "%s/node0/" BLOB, own);
            check_same(path, kept);
            must(peer_delete(node, 1, "node0", "", &err), &err);
        }
    }
    assert_true(damaged >= 4);
    peer_node_end(second);
}

/* A copy that has changed where it is kept is never given out; another node's is. */
static void test_bits_that_flip_in_a_kept_copy(void **state) {
    (void)state;
    char path[600], back[600], kept[700];
    uint64_t sent;
    ckd_error err;
    write_file(path, "one", BLOB_BYTES, 1);
    snprintf(back, sizeof(back), "%s/back", folder);
    snprintf(kept, sizeof(kept), "%s/node1/node0/" BLOB, folder);
    must(peer_put(&sent, node, 1, &(peer_copy){"node0", BLOB, path, NULL}, &err), &err);
    must(peer_put(&sent, node, 2, &(peer_copy){"node0", BLOB, path, NULL}, &err), &err);
    const unsigned times = (unsigned)test_pick(6, 500, 5000);
    for (unsigned i = 0; i < times; i++) {
        uint64_t at = next_random() % BLOB_BYTES;
        flip_byte(kept, at);
        assert_int_equal(peer_fetch(node, 1, "node0", BLOB, back, &err), CKD_E_CORRUPT);
        assert_false(file_exists(back));
        flip_byte(kept, at);
    }
    assert_int_equal(truncate(kept, BLOB_BYTES - 1), 0);
    assert_int_equal(peer_fetch(node, 1, "node0", BLOB, back, &err), CKD_E_CORRUPT);
    must(peer_fetch(node, 2, "node0", BLOB, back, &err), &err);
    check_same(path, back);
}

static void test_another_secret(void **state) {
    (void)state;
    peer_node *stranger;
    peer_secret other = {.data = "a secret of no test!", .size = 20};
    char own[600], path[600];
    uint64_t sent;
    ckd_error err;
    peer_hosts all = hosts;
    peer_options o = {.hosts = &all, .secret = &other, .budget_bytes = BUDGET, .silence_ms = SILENCE_MS};
    end_process(1);
    snprintf(own, sizeof(own), "%s/stranger", folder);
    write_file(path, "one", 1000, 1);
    o.folder = own;
    all.self = 1;
    must(peer_node_begin(&stranger, &o, &err), &err);
    peer_node_await_first_look(stranger);
    assert_false(peer_alive(stranger, 2));
    assert_int_equal(peer_put(&sent, stranger, 2, &(peer_copy){"node1", BLOB, path, NULL}, &err), CKD_E_IO);
    wire *w;
    wire_limits limits = {SILENCE_MS, -1, NULL, NULL};
    assert_int_equal(peer_connect(&w, stranger, 2, &limits, &err), CKD_E_READ_ONLY);
    assert_non_null(strstr(err.message, "secret"));
    peer_node_end(stranger);
}

/* A node of another version learns from the answer which one this is. So the places of these in a head never change. */
static void test_another_version(void **state) {
    (void)state;
    enum { VERSION = 4, KIND = 6, BODY_HASH = 16, HEAD_HASH = 32, HEAD = 40 };
    uint8_t hello[HEAD] = {'c', 'k', 'd', 'P'}, answer[HEAD];
    wire *w;
    wire_limits limits = {SILENCE_MS, -1, NULL, NULL};
    ckd_error err;
    hash128 nothing = hash128_of("", 0);
    hello[VERSION] = PEER_PROTOCOL + 1;
    hello[KIND] = FRAME_HELLO;
    memcpy(hello + BODY_HASH, nothing.bytes, sizeof(nothing.bytes));
    store_le64(hello + HEAD_HASH, hash64(hello, HEAD_HASH));
    must(wire_connect(&w, node->net, &hosts.items[1], &limits, &err), &err);
    must(wire_send(w, hello, HEAD, &err), &err);
    must(wire_receive(w, answer, HEAD, &err), &err);
    assert_memory_equal(answer, "ckdP", 4);
    assert_int_equal(load_le16(answer + VERSION), PEER_PROTOCOL);
    assert_true(load_le64(answer + HEAD_HASH) == hash64(answer, HEAD_HASH));
    wire_close(w);
}

/* Sends a greeting as node1, and then what node2 has answered as this side's proof. Returns what node2 says to that. */
static ckd_status send_back_the_proof(wire *w, ckd_error *err) {
    bytes hello = {.size = 0}, answer = {.size = 0};
    bool answered;
    uint8_t nonce[SECRET_NONCE] = {1};
    bytes_put_string(&hello, hosts.items[1].name);
    bytes_put(&hello, nonce, sizeof(nonce));
    must(frame_send(w, FRAME_HELLO, hello.data, hello.size, err), err);
    must(frame_take_answer(&answer, &answered, w, ANSWER_MAX, err), err);
    assert_int_equal(answer.size, SECRET_NONCE + SECRET_PROOF);
    must(frame_send(w, FRAME_PROOF, answer.data + SECRET_NONCE, SECRET_PROOF, err), err);
    ckd_status status = frame_take_answer(&answer, &answered, w, ANSWER_MAX, err);
    assert_true(answered);
    bytes_free(&hello);
    bytes_free(&answer);
    return status;
}

/* Who connects without the secret may not ask for anything, although it has a proof: that of the node that listens. */
static void test_a_proof_that_is_sent_back(void **state) {
    (void)state;
    wire *w;
    wire_limits limits = {SILENCE_MS, -1, NULL, NULL};
    bytes body = {.size = 0};
    frame_kind kind;
    ckd_error err;
    must(wire_connect(&w, node->net, &hosts.items[2], &limits, &err), &err);
    assert_int_equal(send_back_the_proof(w, &err), CKD_E_READ_ONLY);
    assert_non_null(strstr(err.message, "secret"));
    (void)frame_send(w, FRAME_LIST, "", 0, &err);
    assert_int_not_equal(frame_receive(&kind, &body, w, &err), CKD_OK);
    wire_close(w);
    bytes_free(&body);
}

/* A status that does not exist, or says that this node ends, is an error of the peer. */
static void test_odd_statuses(void **state) {
    (void)state;
    static const struct {
        uint8_t sent;
        ckd_status taken;
    } cases[] = {{CKD_E_NOSPACE, CKD_E_NOSPACE},
                 {CKD_E_CANCELLED, CKD_E_IO},
                 {CKD_E_DEVICE + 1, CKD_E_IO},
                 {200, CKD_E_IO}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        uint8_t question[2] = {'!', cases[i].sent};
        bytes asked = {question, 2, 2, false}, answer = {.size = 0};
        ckd_error err;
        assert_int_equal(peer_ask(&answer, node, 1, &asked, false, &err), cases[i].taken);
        assert_int_equal(err.status, cases[i].taken);
        bytes_free(&answer);
    }
}

/* What comes before the secret, or instead of a message, ends the connection and nothing else. */
static void test_noise(void **state) {
    (void)state;
    uint8_t noise[4096];
    wire_limits limits = {SILENCE_MS, -1, NULL, NULL};
    bytes body = {.size = 0};
    frame_kind kind;
    ckd_error err;
    for (unsigned i = 0; i < 7; i++) {
        wire *w;
        for (size_t k = 0; k < sizeof(noise); k++) {
            noise[k] = (uint8_t)(k * (i + 3) >> i);
        }
        must(wire_connect(&w, node->net, &hosts.items[2], &limits, &err), &err);
        if (i == 6) {
            must(frame_send(w, FRAME_HELLO, noise, HELLO_MAX + 1, &err),
                 &err); /* is not read, nor answered */
        } else if (i % 2) {
            must(frame_send(w, FRAME_LIST, noise, 100, &err), &err); /* without a greeting */
        } else {
            (void)wire_send(w, noise, sizeof(noise), &err);
        }
        assert_int_not_equal(frame_receive(&kind, &body, w, &err), CKD_OK);
        wire_close(w);
    }
    assert_int_equal(frame_send(NULL, FRAME_DATA, noise, FRAME_MAX + 1, &err), CKD_E_INVALID);
    assert_true(peer_alive(node, 2));
    bytes_free(&body);
}

static void test_the_bucket(void **state) {
    (void)state;
    int stop;
    bucket b;
    ckd_error err;
    must(local_notifier(&stop, &err), &err);
    bucket_init(&b, &(peer_options){.bytes_per_s = 1 << 20}, stop);
    uint64_t begun_ns = clock_monotonic_ns();
    for (int i = 0; i < 4; i++) {
        must(bucket_take(&b, 1 << 17, &err), &err);
    }
    /* an eighth of a second each, but for what the bucket held, and the last one, which leaves a debt */
    assert_true(clock_monotonic_ns() - begun_ns >= UINT64_C(200000000));
    local_notify(stop);
    while (bucket_take(&b, 1 << 20, &err) == CKD_OK) {
    }
    assert_string_equal(err.message, "the agent is ending");
    bucket_destroy(&b);
    local_close(stop);
}

typedef struct phases {
    unsigned asked, busy; /* training is busy for so many questions */
} phases;

static bool is_busy(void *context) {
    phases *p = context;
    return p->asked++ < p->busy;
}

/* Packets wait until training is idle. One that never is makes each packet wait for a while. */
static void test_training_that_is_busy(void **state) {
    (void)state;
    int stop;
    bucket b;
    ckd_error err;
    phases p = {.busy = 3};
    must(local_notifier(&stop, &err), &err);
    bucket_init(&b, &(peer_options){.is_busy = is_busy, .context = &p}, stop);
    must(bucket_take(&b, 1, &err), &err);
    assert_int_equal(p.asked, 4);
    p.busy = UINT_MAX;
    uint64_t begun_ns = clock_monotonic_ns();
    must(bucket_take(&b, 1, &err), &err);
    assert_true(clock_monotonic_ns() - begun_ns >= UINT64_C(90000000) && p.asked > 5);
    bucket_destroy(&b);
    local_close(stop);
}

int main(int argc, char **argv) {
    if (argc == 5 && strcmp(argv[1], "node") == 0) {
        return run_node(argv);
    }
#define WITH_NODES(TEST) cmocka_unit_test_setup_teardown(TEST, set_up, tear_down)
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_the_bucket),
        cmocka_unit_test(test_training_that_is_busy),
        WITH_NODES(test_blobs_travel_and_come_back),
        WITH_NODES(test_parts_and_own_files),
        WITH_NODES(test_kept_files_that_vanish),
        WITH_NODES(test_a_budget_and_names),
        WITH_NODES(test_questions),
        WITH_NODES(test_answers_that_do_not_come),
        WITH_NODES(test_many_strangers),
        WITH_NODES(test_killed_and_stopped_nodes),
        WITH_NODES(test_kills_during_transfers),
        WITH_NODES(test_bits_that_flip_on_their_way),
        WITH_NODES(test_bits_that_flip_in_a_sent_copy),
        WITH_NODES(test_bits_that_flip_in_a_kept_copy),
        WITH_NODES(test_another_secret),
        WITH_NODES(test_another_version),
        WITH_NODES(test_a_proof_that_is_sent_back),
        WITH_NODES(test_odd_statuses),
        WITH_NODES(test_noise),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    if (under_sanitizer()) { /* the leak sanitizer crashes now and then while it stops the threads of UCX */
        fflush(NULL);
        _exit(failed);
    }
    return failed;
}
