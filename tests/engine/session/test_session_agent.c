/* A session ends with a fake agent, which gives the answers that a test wants. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>
#include <pthread.h>
#include <unistd.h>

#include "base/error.h"
#include "engine/slots/slots.h"
#include "tests/support/tempdir.h"
#include "tests/support/trainers.h"

static struct {
    int listener;
    ckd_status at_goodbye;
    char said[4096];
} agent;

static void *serve(void *context) {
    int fd;
    slot_message m = {.fd_count = 0};
    assert_int_equal(local_accept(&fd, agent.listener, NULL), CKD_OK);
    while (slot_message_receive(&m, fd, NULL) == CKD_OK) {
        slot_reply reply;
        slot_message answer = {.kind = SLOT_REPLY};
        memset(&reply, 0, sizeof(reply));
        if (m.kind == SLOT_GOODBYE) {
            reply.status = err_set(&reply.error, agent.at_goodbye, "the store's disk is gone");
        }
        bytes_put(&answer.body, &reply, sizeof(reply));
        (void)slot_message_send(fd, &answer, NULL);
        slot_message_free(&answer);
        slot_message_free(&m);
    }
    local_close(fd);
    return context;
}

static void on_message(void *context, const char *message) {
    size_t length = strlen(agent.said);
    (void)context;
    snprintf(agent.said + length, sizeof(agent.said) - length, "%s\n", message);
}

/* Closes a session whose agent answers its goodbye like this. */
static ckd_status close_with(const char *dir, ckd_status at_goodbye, ckd_error *err) {
    char path[LOCAL_PATH_MAX + 1];
    pthread_t thread;
    ckd_store_options store = CKD_STORE_OPTIONS_INIT;
    ckd_session_options o = session_options();
    agent.at_goodbye = at_goodbye;
    agent.said[0] = '\0';
    snprintf(path, sizeof(path), "%s/agent", dir);
    must(local_listen(&agent.listener, path, err), err);
    assert_int_equal(pthread_create(&thread, NULL, serve, NULL), 0);
    store.on_message = on_message;
    o.store = &store;
    o.agent = path;
    trainer *t = trainer_new(1);
    ckd_session *s = session_of(dir, &o, t);
    ckd_status status = ckd_session_close(s, err);
    trainer_free(t);
    assert_int_equal(pthread_join(thread, NULL), 0);
    local_close(agent.listener);
    unlink(path);
    return status;
}

static void test_close_fails_if_the_agent_cannot_save_the_rest(void **state) {
    ckd_error err;
    assert_int_equal(close_with(*state, CKD_E_IO, &err), CKD_E_IO);
    assert_non_null(strstr(err.message, "only other nodes have"));
    assert_non_null(strstr(err.message, "the store's disk is gone"));
    assert_non_null(strstr(agent.said, err.message));
    /* an agent that is busy lives as well */
    assert_int_equal(close_with(*state, CKD_E_BUSY, &err), CKD_E_BUSY);
    assert_non_null(strstr(agent.said, err.message));
}

static void test_close_succeeds_if_nothing_is_left(void **state) {
    ckd_error err;
    must(close_with(*state, CKD_OK, &err), &err);
    assert_string_equal(agent.said, "");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        tempdir_test(test_close_fails_if_the_agent_cannot_save_the_rest),
        tempdir_test(test_close_succeeds_if_nothing_is_left),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
