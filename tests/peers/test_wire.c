/* Connections between nodes: over sockets, over UCX, and how their waits end. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <arpa/inet.h>
#include <pthread.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/local_socket.h"
#include "peers/internal.h"
#include "tests/support/scenes.h"

#define SILENCE_MS 20000
#define CALLERS    8
#define CALLS      400 /* of each */
#define BYTES      (3u << 20)

static void must(ckd_status status, const ckd_error *err) {
    if (status != CKD_OK) {
        print_error("%s\n", err->message);
    }
    assert_int_equal(status, CKD_OK);
}

/* ---- a node that listens, and sends back what it receives ---- */

typedef struct echo {
    peer_host at;
    ucx_net *net;
    int listener, stop;
    pthread_t acceptor;
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    unsigned open, served;
} echo;

typedef struct caller {
    echo *of;
    wire *wire;
    unsigned number, failed;
} caller;

/* As serve.c does once the secret is proved. */
static ckd_status answer_address(wire *w) {
    frame_kind kind;
    bytes body = {.size = 0}, own = {.size = 0};
    ckd_status status = frame_receive(&kind, &body, w, NULL);
    if (status == CKD_OK && body.size > 0) {
        wire_address(&own, w);
    }
    if (wire_reach(w, &body, NULL) != CKD_OK) {
        bytes_clear(&own);
    }
    THEN(status, frame_answer(w, CKD_OK, NULL, &own, NULL));
    wire_switch(w);
    bytes_free(&body);
    bytes_free(&own);
    return status;
}

/* *linked: both sides have an address. */
static ckd_status exchange(wire *w, bool *linked, ckd_error *err) {
    bool answered;
    bytes own = {.size = 0}, theirs = {.size = 0};
    wire_address(&own, w);
    ckd_status status = frame_send(w, FRAME_ADDRESS, own.data, own.size, err);
    THEN(status, frame_take_answer(&theirs, &answered, w, FRAME_MAX, err));
    THEN(status, wire_reach(w, &theirs, err));
    if (status == CKD_OK) {
        wire_switch(w);
    }
    *linked = theirs.size > 0;
    bytes_free(&own);
    bytes_free(&theirs);
    return status;
}

static void *echo_main(void *context) {
    caller *c = context;
    echo *e = c->of;
    frame_kind kind;
    bytes body = {.size = 0};
    wire_set_limits(c->wire, &(wire_limits){SILENCE_MS, e->stop, NULL, NULL});
    ckd_status status = answer_address(c->wire);
    while (status == CKD_OK) {
        status = frame_receive(&kind, &body, c->wire, NULL);
        THEN(status, frame_send(c->wire, kind, body.data, body.size, NULL));
    }
    wire_close(c->wire);
    bytes_free(&body);
    free(c);
    pthread_mutex_lock(&e->mutex);
    e->open--;
    e->served++;
    pthread_cond_broadcast(&e->changed);
    pthread_mutex_unlock(&e->mutex);
    return NULL;
}

static void *accept_main(void *context) {
    echo *e = context;
    wire *w;
    while (wire_accept(&w, e->net, e->listener, e->stop, NULL) == CKD_OK) {
        pthread_t thread;
        caller *c = calloc(1, sizeof(*c));
        *c = (caller){.of = e, .wire = w};
        pthread_mutex_lock(&e->mutex);
        e->open++;
        pthread_mutex_unlock(&e->mutex);
        pthread_create(&thread, NULL, echo_main, c);
        pthread_detach(thread);
    }
    return NULL;
}

static void echo_listen(echo *e, ucx_net *net) {
    ckd_error err;
    struct sockaddr_in is;
    socklen_t size = sizeof(is);
    *e = (echo){.at = {.name = "127.0.0.1:0", .host = "127.0.0.1"}, .net = net};
    pthread_mutex_init(&e->mutex, NULL);
    pthread_cond_init(&e->changed, NULL);
    must(local_notifier(&e->stop, &err), &err);
    must(tcp_listen(&e->listener, &e->at, &err), &err);
    assert_int_equal(getsockname(e->listener, (struct sockaddr *)&is, &size), 0);
    e->at.port = ntohs(is.sin_port);
}

static void echo_begin(echo *e, ucx_net *net) {
    echo_listen(e, net);
    assert_int_equal(pthread_create(&e->acceptor, NULL, accept_main, e), 0);
}

static void echo_end(echo *e) {
    local_notify(e->stop);
    if (e->acceptor) {
        pthread_join(e->acceptor, NULL);
    }
    pthread_mutex_lock(&e->mutex);
    while (e->open > 0) {
        pthread_cond_wait(&e->changed, &e->mutex);
    }
    pthread_mutex_unlock(&e->mutex);
    local_close(e->listener);
    local_close(e->stop);
}

static wire *call(echo *e, ucx_net *net, bool *linked) {
    wire *w;
    ckd_error err;
    must(wire_connect(&w, net, &e->at, &(wire_limits){SILENCE_MS, e->stop, NULL, NULL}, &err), &err);
    must(exchange(w, linked, &err), &err);
    return w;
}

static void send_and_compare(wire *w) {
    static uint8_t sent[BYTES], got[BYTES];
    ckd_error err;
    for (size_t i = 0; i < BYTES; i++) {
        sent[i] = (uint8_t)(i * 7 >> 3);
    }
    for (size_t at = 0; at < BYTES; at += PEER_PACKET) {
        frame_kind kind;
        bytes body = {.size = 0};
        must(frame_send(w, FRAME_DATA, sent + at, PEER_PACKET, &err), &err);
        must(frame_receive(&kind, &body, w, &err), &err);
        assert_int_equal(body.size, PEER_PACKET);
        memcpy(got + at, body.data, body.size);
        bytes_free(&body);
    }
    assert_memory_equal(sent, got, BYTES);
}

/* ---- tests ---- */

/* Some end before they have an answer, some before they have asked. */
static void *call_and_call(void *context) {
    caller *c = context;
    for (unsigned i = 0; i < CALLS; i++) {
        bool linked;
        frame_kind kind;
        bytes body = {.size = 0};
        wire *w = NULL;
        ckd_status status =
            wire_connect(&w, NULL, &c->of->at, &(wire_limits){SILENCE_MS, c->of->stop, NULL, NULL}, NULL);
        if ((i + c->number) % 4 > 0) {
            THEN(status, exchange(w, &linked, NULL));
            THEN(status, frame_send(w, FRAME_PING, "ping", 4, NULL));
        }
        if ((i + c->number) % 4 > 1) {
            THEN(status, frame_receive(&kind, &body, w, NULL));
            c->failed += status == CKD_OK && body.size != 4;
        }
        c->failed += status != CKD_OK;
        wire_close(w);
        bytes_free(&body);
    }
    return NULL;
}

/* Descriptors are closed by some threads and get their numbers again in others. */
static void test_many_short_connections(void **state) {
    (void)state;
    echo e;
    caller callers[CALLERS];
    pthread_t threads[CALLERS];
    echo_begin(&e, NULL);
    for (unsigned i = 0; i < CALLERS; i++) {
        callers[i] = (caller){.of = &e, .number = i};
        assert_int_equal(pthread_create(&threads[i], NULL, call_and_call, &callers[i]), 0);
    }
    for (unsigned i = 0; i < CALLERS; i++) {
        pthread_join(threads[i], NULL);
        assert_int_equal(callers[i].failed, 0);
    }
    pthread_mutex_lock(&e.mutex);
    while (e.served < CALLERS * CALLS) {
        pthread_cond_wait(&e.changed, &e.mutex);
    }
    pthread_mutex_unlock(&e.mutex);
    echo_end(&e);
}

static void test_bytes_over_a_socket(void **state) {
    (void)state;
    echo e;
    bool linked;
    echo_begin(&e, NULL);
    wire *w = call(&e, NULL, &linked);
    assert_false(linked);
    send_and_compare(w);
    wire_close(w);
    echo_end(&e);
}

static ucx_net *open_with_tcp(void) {
    ucx_net *net;
    ckd_error err;
#ifdef __SANITIZE_THREAD__ /* a hook of UCX in madvise crashes it when a thread ends */
    printf("SKIP: a hook of UCX in madvise crashes the thread sanitizer\n");
    skip();
#endif
    setenv("UCX_LOG_LEVEL", "fatal", 0);
    setenv("CKD_UCX_TLS", "tcp", 1);
    ckd_status status = ucx_open(&net, &err);
    unsetenv("CKD_UCX_TLS");
    if (status == CKD_E_UNSUPPORTED) {
        printf("SKIP: %s\n", err.message);
        skip();
    }
    must(status, &err);
    assert_non_null(net);
    return net;
}

static void test_bytes_over_ucx(void **state) {
    (void)state;
    echo e;
    bool linked;
    uint8_t byte;
    ckd_error err;
    ucx_net *net = open_with_tcp();
    echo_begin(&e, net);
    wire *w = call(&e, net, &linked);
    assert_true(linked);
    send_and_compare(w);
    local_notify(e.stop); /* the other side closes the connection */
    wire_set_limits(w, &(wire_limits){SILENCE_MS, -1, NULL, NULL});
    assert_int_equal(wire_receive(w, &byte, 1, &err), CKD_E_IO);
    assert_int_equal(wire_send(w, &byte, 1, &err), CKD_E_IO);
    wire_close(w);
    echo_end(&e);
    ucx_close(net);
}

/* Whichever side it is, the connection stays on its socket. */
static void test_one_side_without_ucx(void **state) {
    (void)state;
    ucx_net *net = open_with_tcp();
    for (int listens = 0; listens < 2; listens++) {
        echo e;
        bool linked;
        echo_begin(&e, listens ? net : NULL);
        wire *w = call(&e, listens ? NULL : net, &linked);
        assert_false(linked);
        send_and_compare(w);
        wire_close(w);
        echo_end(&e);
    }
    ucx_close(net);
}

static void test_transports_that_do_not_exist(void **state) {
    (void)state;
    ucx_net *net;
    ckd_error err;
    ucx_close(open_with_tcp());
    setenv("CKD_UCX_TLS", "nothing", 1);
    assert_int_equal(ucx_open(&net, &err), CKD_E_IO);
    assert_non_null(strstr(err.message, "CKD_UCX_TLS"));
    assert_null(net);
    unsetenv("CKD_UCX_TLS");
}

static bool always_lost(void *of) {
    (void)of;
    return true;
}

static void test_waits_that_end(void **state) {
    (void)state;
    echo e;
    wire *w;
    uint8_t byte = 0;
    ckd_error err;
    echo_listen(&e, NULL); /* nobody accepts */
    must(wire_connect(&w, NULL, &e.at, &(wire_limits){50, e.stop, NULL, NULL}, &err), &err);
    assert_int_equal(wire_receive(w, &byte, 1, &err), CKD_E_BUSY);
    wire_set_limits(w, &(wire_limits){SILENCE_MS, e.stop, always_lost, NULL});
    assert_int_equal(wire_receive(w, &byte, 1, &err), CKD_E_IO);
    local_notify(e.stop);
    wire_set_limits(w, &(wire_limits){SILENCE_MS, e.stop, NULL, NULL});
    assert_int_equal(wire_receive(w, &byte, 1, &err), CKD_E_CANCELLED);
    assert_int_equal(wire_send(w, &byte, 1, &err), CKD_E_CANCELLED); /* although there is room for it */
    wire_close(w);
    assert_int_equal(wire_accept(&w, NULL, e.listener, e.stop, &err), CKD_E_CANCELLED);
    echo_end(&e);
    /* nobody listens any more */
    assert_int_equal(wire_connect(&w, NULL, &e.at, &(wire_limits){SILENCE_MS, -1, NULL, NULL}, &err),
                     CKD_E_IO);
    assert_non_null(strstr(err.message, "refused"));
}

/* Others know this node by an address that its machine does not have, as behind NAT. */
static void test_an_address_of_another_machine(void **state) {
    (void)state;
    echo e;
    int listener, connection;
    ckd_error err;
    echo_listen(&e, NULL);
    peer_host there = e.at, here = e.at;
    echo_end(&e);
    snprintf(there.host, sizeof(there.host), "192.0.2.1"); /* for documentation (RFC 5737) */
    must(tcp_listen(&listener, &there, &err), &err);
    must(tcp_connect(&connection, &here, &(wire_limits){SILENCE_MS, -1, NULL, NULL}, &err), &err);
    local_close(connection);
    local_close(listener);
}

static void test_an_address_in_use(void **state) {
    (void)state;
    echo e;
    int other;
    ckd_error err;
    echo_listen(&e, NULL);
    assert_int_equal(tcp_listen(&other, &e.at, &err), CKD_E_IO);
    assert_non_null(strstr(err.message, "cannot listen at 127.0.0.1"));
    echo_end(&e);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_many_short_connections),
        cmocka_unit_test(test_bytes_over_a_socket),
        cmocka_unit_test(test_bytes_over_ucx),
        cmocka_unit_test(test_one_side_without_ucx),
        cmocka_unit_test(test_transports_that_do_not_exist),
        cmocka_unit_test(test_waits_that_end),
        cmocka_unit_test(test_an_address_in_use),
        cmocka_unit_test(test_an_address_of_another_machine),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    if (under_sanitizer()) { /* the leak sanitizer crashes now and then while it stops the threads of UCX */
        fflush(NULL);
        _exit(failed);
    }
    return failed;
}
