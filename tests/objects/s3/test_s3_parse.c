/* The parts of the S3 implementation that need no server: addresses, queries, answers, credentials. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "objects/s3/s3.h"

static bytes bytes_of(const char *text) {
    bytes out = {0};
    bytes_put(&out, text, strlen(text));
    return out;
}

/* ---- addresses, queries ---- */

static void test_addresses(void **state) {
    (void)state;
    static const struct {
        const char *address, *bucket, *prefix;
    } good[] = {{"s3://bucket", "bucket", ""},
                {"s3://bucket/", "bucket", ""},
                {"s3://my.bucket-1/a/b", "my.bucket-1", "a/b/"},
                {"s3://bucket/a//", "bucket", "a/"}};
    static const char *const bad[] = {
        "s3://",
        "s3://ab",
        "s3:///a",
        "s3://b?cket",
        "s3://a..b",
        "s3://-abc",
        "s3://bucket/a//b",
        "s3://bucket//a",
        "s3://bucket/.a",
        "s3://bucket/a b",
        "s3://bucket/../a",
        "s3://buck et",
        "s3://aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa/a"};
    for (size_t i = 0; i < sizeof(good) / sizeof(good[0]); i++) {
        s3_address a;
        assert_int_equal(s3_address_parse(&a, good[i].address, NULL), CKD_OK);
        assert_string_equal(a.bucket, good[i].bucket);
        assert_string_equal(a.prefix, good[i].prefix);
    }
    char longest[1024] = "s3://bucket/";
    s3_address prefixed;
    for (size_t i = 0; i < OBJECT_KEY_MAX - 2; i++) {
        strcat(longest, i % 2 ? "/" : "a");
    }
    longest[strlen(longest) - 1] = 'a';
    assert_int_equal(s3_address_parse(&prefixed, longest, NULL), CKD_OK);
    assert_true(strlen(prefixed.prefix) + OBJECT_KEY_MAX <= 1024);
    assert_int_equal(s3_address_parse(&prefixed, strcat(longest, "a"), NULL), CKD_E_INVALID);
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        s3_address a;
        ckd_error err = {0};
        assert_int_equal(s3_address_parse(&a, bad[i], &err), CKD_E_INVALID);
        assert_true(err.message[0]);
    }
}

static void test_queries_are_canonical(void **state) {
    (void)state;
    const char *pairs[] = {"uploads", "",           "prefix",      "a/b ~", "max-uploads",
                           "10",      "key-marker", "x+\xc3\xa4%", NULL};
    bytes out = {0};
    s3_query(&out, pairs);
    bytes_put_u8(&out, 0);
    assert_string_equal((char *)out.data,
                        "?key-marker=x%2B%C3%A4%25&max-uploads=10&prefix=a%2Fb%20~&uploads=");
    bytes_free(&out);
}

static void test_encoded_text(void **state) {
    (void)state;
    char whole[256 * 3 + 1], back[256 * 3 + 1];
    for (int i = 1; i < 256; i++) {
        whole[i - 1] = (char)i;
    }
    whole[255] = 0;
    bytes out = {0};
    s3_encode(&out, whole);
    bytes_put_u8(&out, 0);
    strcpy(back, (char *)out.data);
    assert_true(s3_decode(back));
    assert_string_equal(back, whole);
    bytes_free(&out);
    static const char *const bad[] = {"%", "%a", "a%zz", "%00", "a%4"};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        strcpy(back, bad[i]);
        assert_false(s3_decode(back));
    }
    strcpy(back, "a+b%2f%2B");
    assert_true(s3_decode(back));
    assert_string_equal(back, "a b/+");
}

/* Parts that are larger than needed take memory for nothing. */
static void test_sizes_of_parts(void **state) {
    (void)state;
    const uint64_t mib = UINT64_C(1) << 20, usual = 16 * mib;
    static const uint64_t sizes[] = {1, 100, 156, 157, 1000, 1024, 5 * 1024}; /* GiB */
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        uint64_t size = sizes[i] * 1024 * mib, part = s3_part_size(usual, size);
        assert_true(part >= usual && part % mib == 0 && (size + part - 1) / part <= 10000);
        assert_true(part == usual || size > (part - mib) * 10000);
    }
    assert_true(s3_part_size(usual, usual * 10000) == usual);
    assert_true(s3_part_size(usual, usual * 10000 + 1) == usual + mib);
}

static void test_hashes(void **state) {
    (void)state;
    char sha[65], md5[32];
    assert_true(s3_sha256(sha, "abc", 3));
    assert_string_equal(sha, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    assert_true(s3_md5(md5, "abc", 3));
    assert_string_equal(md5, "kAFQmDzST7DWlj99KOF/cg==");
}

/* ---- answers ---- */

#define ITEM(key, size) "<Contents><Key>" key "</Key><Size>" size "</Size></Contents>"

static ckd_status list(object_page *page, const char *prefix, const char *after, const char *text,
                       ckd_error *err) {
    bytes answer = bytes_of(text);
    s3_listed asked = {prefix, after, prefix, 3};
    char *token = NULL;
    *page = (object_page){0};
    ckd_status status = s3_listing_parse(page, &asked, &answer, &token, err);
    assert_null(token);
    bytes_free(&answer);
    if (status != CKD_OK) {
        object_page_free(page);
    }
    return status;
}

static void test_listings(void **state) {
    (void)state;
    object_page page;
    ckd_error err = {0};
    assert_int_equal(
        list(
            &page, "p/", "",
            "<?xml version='1.0'?>\n<ListBucketResult xmlns='http://x'><Name>b</Name><Prefix>p/</Prefix>" ITEM(
                "p%2Fa", "3") ITEM("p%2Fa%20b", "1")
                ITEM(
                    "p%2Fz",
                    " 18446744073709551615 ") "<IsTruncated>true</IsTruncated><EncodingType>url</EncodingType></ListBucketResult>",
            &err),
        CKD_OK);
    assert_int_equal(page.count, 2);
    assert_string_equal(page.items[0].key, "a");
    assert_int_equal(page.items[0].size, 3);
    assert_string_equal(page.items[1].key, "z");
    assert_true(page.items[1].size == UINT64_MAX);
    assert_string_equal(page.next, "z");
    object_page_free(&page);
    assert_int_equal(list(&page, "", "",
                          "<ListBucketResult>" ITEM("a&amp;b", "1")
                              ITEM("b", "2") "<IsTruncated>false</IsTruncated></ListBucketResult>",
                          &err),
                     CKD_OK);
    assert_int_equal(page.count, 1);
    assert_null(page.next);
    object_page_free(&page);
}

static void test_listings_that_are_refused(void **state) {
    (void)state;
    static const struct {
        const char *text;
        ckd_status status;
    } bad[] = {
        {"", CKD_E_CORRUPT},
        {"<html><body>hello</body></html>", CKD_E_CORRUPT},
        {"<ListBucketResult>", CKD_E_CORRUPT},
        {"<ListBucketResult>" ITEM("p/a", "x") "</ListBucketResult>", CKD_E_CORRUPT},
        {"<ListBucketResult>" ITEM("p/a", "-1") "</ListBucketResult>", CKD_E_CORRUPT},
        {"<ListBucketResult>" ITEM("p/a", "18446744073709551616") "</ListBucketResult>", CKD_E_CORRUPT},
        {"<ListBucketResult>" ITEM("q/a", "1") "</ListBucketResult>", CKD_E_CORRUPT},
        {"<ListBucketResult><Contents><Size>1</Size></Contents></ListBucketResult>", CKD_E_CORRUPT},
        {"<ListBucketResult><EncodingType>url</EncodingType>" ITEM("p/%zz", "1") "</ListBucketResult>",
         CKD_E_CORRUPT},
        {"<ListBucketResult>" ITEM("p/b", "1") ITEM("p/a", "1") "</ListBucketResult>", CKD_E_UNSUPPORTED},
        {"<ListBucketResult>" ITEM("p/a", "1") ITEM("p/a", "1") "</ListBucketResult>", CKD_E_UNSUPPORTED},
        {"<ListBucketResult>" ITEM("p/A", "1") "</ListBucketResult>", CKD_E_UNSUPPORTED}, /* not after p/X */
        {"<ListBucketResult><IsTruncated>true</IsTruncated></ListBucketResult>", CKD_E_CORRUPT},
        {"<ListBucketResult>" ITEM("p/a", "1") "</ListBucketResult>", CKD_E_CORRUPT}, /* is there more? */
        {"<ListBucketResult>" ITEM("p/Y", "1") ITEM("p/a", "1") ITEM("p/b", "1")
             ITEM("p/c", "1") "<IsTruncated>false</IsTruncated></ListBucketResult>",
         CKD_E_CORRUPT}, /* three were asked for */
        {"<!DOCTYPE x [<!ENTITY a 'aaaaaaaa'>]><ListBucketResult>" ITEM("p/&a;", "1") "</ListBucketResult>",
         CKD_E_CORRUPT},
        {"<!DOCTYPE x SYSTEM 'file:///etc/passwd'><ListBucketResult></ListBucketResult>", CKD_E_CORRUPT},
        {"<a><a><a><a><a><a><a><a><a></a></a></a></a></a></a></a></a></a>", CKD_E_CORRUPT},
        {"<ListBucketResult>\xff\xfe</ListBucketResult>", CKD_E_CORRUPT},
        {"<ListBucketResult/><more/>", CKD_E_CORRUPT},
    };
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        object_page page;
        ckd_error err = {0};
        assert_int_equal(list(&page, "p/", "p/X", bad[i].text, &err), bad[i].status);
        assert_true(err.message[0]);
    }
}

static ckd_status count_element(void *context, const char *path, const char *text, ckd_error *err) {
    (void)path, (void)text, (void)err;
    ++*(size_t *)context;
    return CKD_OK;
}

/*
 * expat reports the end of an empty element even if its beginning stopped the parser. The name is so long that a path
 * that is cut by it lies far from anything mapped.
 */
static void test_an_empty_element_is_refused(void **state) {
    (void)state;
    static const char *const before[] = {"<a><a><a><a><a><a><a><a>",
                                         ""}; /* too deep; a path that is too long */
    for (size_t i = 0; i < 2; i++) {
        bytes text = bytes_of(before[i]);
        size_t count = 0, size = S3_ANSWER_MAX - 100;
        bytes_put_u8(&text, '<');
        memset(bytes_extend(&text, size), 'b', size);
        bytes_put(&text, "/>", 2);
        assert_int_equal(s3_xml_parse(text.data, text.size, count_element, &count, NULL), CKD_E_CORRUPT);
        assert_int_equal(count, 0);
        bytes_free(&text);
    }
}

static void test_sizes_of_answers_are_bounded(void **state) {
    (void)state;
    object_page page;
    ckd_error err = {0};
    size_t size = S3_TEXT_MAX + 1000;
    bytes text = bytes_of("<ListBucketResult><Contents><Key>");
    memset(bytes_extend(&text, size), 'a', size);
    bytes_put(&text, "</Key></Contents></ListBucketResult>", 37);
    assert_int_equal(list(&page, "", "", (char *)text.data, &err), CKD_E_CORRUPT);
    assert_non_null(strstr(err.message, "too long"));
    bytes_free(&text);
    text = bytes_of("<ListBucketResult>");
    for (int i = 0; i <= OBJECT_LIST_MAX; i++) {
        char item[80];
        snprintf(item, sizeof(item), ITEM("k%05d", "1"), i);
        bytes_put(&text, item, strlen(item));
    }
    bytes_put(&text, "</ListBucketResult>", 20);
    assert_int_equal(list(&page, "", "", (char *)text.data, &err), CKD_E_CORRUPT);
    bytes_free(&text);
}

static void test_problems(void **state) {
    (void)state;
    s3_problem p = {0};
    const char *text =
        "<Error><Code>Slow\nDown</Code><Message>a\x7f &#233; b</Message><Region>eu-north-1</Region></Error>";
    s3_problem_parse(&p, text, strlen(text));
    assert_string_equal(p.code, "Slow?Down");
    assert_string_equal(p.message, "a? ?? b");
    assert_string_equal(p.region, "eu-north-1");
    p = (s3_problem){0};
    s3_problem_parse(&p, "<html>", 6);
    assert_string_equal(p.code, "");
    s3_problem_parse(&p, NULL, 0);
    assert_string_equal(p.code, "");
}

static void test_uploads(void **state) {
    (void)state;
    static const char text[] =
        "<ListMultipartUploadsResult><KeyMarker/><NextKeyMarker>k</NextKeyMarker><NextUploadIdMarker>i</NextUploadIdMarker>"
        "<IsTruncated>true</IsTruncated><Upload><Key>p/a</Key><UploadId>1</UploadId><Initiator><ID>x</ID></Initiator>"
        "<Initiated>2026-01-02T03:04:05.000Z</Initiated></Upload></ListMultipartUploadsResult>";
    static const char without_id[] =
        "<ListMultipartUploadsResult><Upload><Key>p/a</Key></Upload></ListMultipartUploadsResult>";
    s3_uploads list = {0};
    char id[8];
    assert_int_equal(s3_uploads_parse(&list, text, strlen(text), NULL), CKD_OK);
    assert_int_equal(list.count, 1);
    assert_string_equal(list.items[0].key, "p/a");
    assert_string_equal(list.items[0].id, "1");
    assert_string_equal(list.items[0].begun, "2026-01-02T03:04:05.000Z");
    assert_string_equal(list.next_key, "k");
    assert_string_equal(list.next_id, "i");
    s3_uploads_free(&list);
    assert_int_equal(s3_uploads_parse(&list, without_id, strlen(without_id), NULL), CKD_E_CORRUPT);
    s3_uploads_free(&list);
    assert_int_equal(
        s3_text_parse(id, sizeof(id), "UploadId", "<A><UploadId>1234567</UploadId></A>", 36 - 1, NULL),
        CKD_OK);
    assert_string_equal(id, "1234567");
    assert_int_equal(
        s3_text_parse(id, sizeof(id), "UploadId", "<A><UploadId>12345678</UploadId></A>", 36, NULL),
        CKD_E_CORRUPT);
    assert_int_equal(
        s3_text_parse(id, sizeof(id), "UploadId", "<A><B><UploadId>1</UploadId></B></A>", 36, NULL),
        CKD_E_CORRUPT);
}

/* ---- credentials ---- */

static s3_profile profile_of(const char *name, bool config, const char *text, bool *found) {
    s3_profile out = {0};
    bytes file = bytes_of(text);
    *found = false;
    assert_int_equal(s3_profile_parse(&out, name, config, &file, found, NULL), CKD_OK);
    bytes_free(&file);
    return out;
}

static void test_profiles(void **state) {
    (void)state;
    bool found;
    static const char credentials[] =
        "# comment\n[default]\naws_access_key_id = A\naws_secret_access_key=S+/=\r\n\n[ other ]\n"
        "  aws_access_key_id = nested\naws_access_key_id=B\naws_session_token = T ; not a comment\n";
    s3_profile p = profile_of("default", false, credentials, &found);
    assert_true(found);
    assert_string_equal(p.id, "A");
    assert_string_equal(p.secret, "S+/=");
    assert_null(p.token);
    s3_profile_free(&p);
    p = profile_of("other", false, credentials, &found);
    assert_string_equal(p.id, "B");
    assert_string_equal(p.token, "T ; not a comment");
    assert_null(p.secret);
    s3_profile_free(&p);
    p = profile_of("absent", false, credentials, &found);
    assert_false(found);
    assert_null(p.id);
    static const char config[] =
        "[profile other]\nregion=eu-west-1\nendpoint_url = http://h:1\ncredential_process = /bin/x --y \"z\"\n"
        "s3 =\n  endpoint_url = http://nested\n[default]\nregion = us-west-2\n[other]\nregion = wrong\nrole_arn = r\n";
    p = profile_of("other", true, config, &found);
    assert_string_equal(p.region, "eu-west-1");
    assert_string_equal(p.endpoint, "http://h:1");
    assert_string_equal(p.process, "/bin/x --y \"z\"");
    assert_false(p.other);
    s3_profile_free(&p);
    p = profile_of("default", true, config, &found);
    assert_string_equal(p.region, "us-west-2");
    s3_profile_free(&p);
    p = profile_of("x", false, "[x]\nrole_arn = r\n[", &found);
    assert_true(p.other);
    s3_profile_free(&p);
}

/* Keys of one file never go with a secret or a token of the other. */
static void test_keys_are_of_one_file(void **state) {
    (void)state;
    s3_profile p = {0};
    bool found = false;
    bytes credentials = bytes_of("[default]\naws_access_key_id = A\naws_secret_access_key = S\n");
    bytes config = bytes_of("[default]\naws_access_key_id = B\naws_session_token = T\nregion = r\n");
    assert_int_equal(s3_profile_parse(&p, "default", false, &credentials, &found, NULL), CKD_OK);
    assert_int_equal(s3_profile_parse(&p, "default", true, &config, &found, NULL), CKD_OK);
    assert_string_equal(p.id, "A");
    assert_null(p.token);
    assert_string_equal(p.region, "r");
    s3_profile_free(&p);
    bytes_free(&credentials);
    bytes_free(&config);
}

static void test_keys_from_json(void **state) {
    (void)state;
    static const char *const bad[] = {
        "",
        "[]",
        "{",
        "{\"AccessKeyId\": \"a\"}",
        "{\"AccessKeyId\": 1, \"SecretAccessKey\": \"b\"}",
        "{\"AccessKeyId\":\"a\",\"SecretAccessKey\":\"topsecret\",\"Expiration\":\"soon\"}"};
    s3_keys keys;
    bytes json = bytes_of(
        "{\"Version\":1,\"AccessKeyId\":\"a\",\"SecretAccessKey\":\"s\",\"SessionToken\":\"t\",\"Expiration\":"
        "\"2026-01-31T12:00:00+01:00\"}");
    assert_int_equal(s3_keys_parse(&keys, &json, "a test", NULL), CKD_OK);
    assert_string_equal(keys.id, "a");
    assert_string_equal(keys.secret, "s");
    assert_string_equal(keys.token, "t");
    assert_int_equal(keys.expires_s, 1769857200);
    s3_keys_free(&keys);
    bytes_free(&json);
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        ckd_error err = {0};
        json = bytes_of(bad[i]);
        assert_int_equal(s3_keys_parse(&keys, &json, "a test", &err), CKD_E_CORRUPT);
        assert_null(strstr(err.message, "topsecret"));
        bytes_free(&json);
    }
}

static void test_times(void **state) {
    (void)state;
    assert_int_equal(s3_time_parse("1970-01-02T00:00:01Z"), 86401);
    assert_int_equal(s3_time_parse("2026-01-31T12:00:00.123Z"), 1769860800);
    assert_int_equal(s3_time_parse("2026-01-31T12:00:00-00:30"), 1769862600);
    static const char *const bad[] = {
        "", "x", "2026-01-31", "2026-01-31T12:00:00", "2026-01-31T12:00:00+x", "1960-01-01T00:00:00Z"};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        assert_int_equal(s3_time_parse(bad[i]), 0);
    }
}

/* ---- retries ---- */

static void test_what_is_tried_again(void **state) {
    (void)state;
    static const struct {
        CURLcode failure;
        long status;
        const char *code;
        bool passes;
    } cases[] = {{CURLE_OK, 500, "", true},
                 {CURLE_OK, 503, "SlowDown", true},
                 {CURLE_OK, 429, "", true},
                 {CURLE_OK, 400, "RequestTimeout", true},
                 {CURLE_OK, 409, "ConditionalRequestConflict", true},
                 {CURLE_OK, 400, "BadDigest", true},
                 {CURLE_OK, 200, "InternalError", true},
                 {CURLE_OK, 403, "AccessDenied", false},
                 {CURLE_OK, 404, "NoSuchKey", false},
                 {CURLE_OK, 412, "PreconditionFailed", false},
                 {CURLE_OK, 501, "", false},
                 {CURLE_OK, 507, "", false},
                 {CURLE_OK, 520, "", true}, /* a proxy that got no sense from the server */
                 {CURLE_OK, 524, "", true},
                 {CURLE_UNSUPPORTED_PROTOCOL, 0, "", true}, /* no HTTP at all came */
                 {CURLE_COULDNT_CONNECT, 0, "", true},
                 {CURLE_PARTIAL_FILE, 0, "", true},
                 {CURLE_OPERATION_TIMEDOUT, 0, "", true},
                 {CURLE_PEER_FAILED_VERIFICATION, 0, "", false},
                 {CURLE_URL_MALFORMAT, 0, "", false}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        s3_request r = {.failure = cases[i].failure, .status = cases[i].status};
        strcpy(r.problem.code, cases[i].code);
        assert_int_equal(s3_passes(&r), cases[i].passes);
    }
    s3_place p = {.pause_ms = 100};
    for (uint32_t i = 1; i < 40; i++) {
        uint64_t bound = i < 8 ? UINT64_C(100000000) << (i - 1) : UINT64_C(20000000000);
        assert_true(s3_pause_ns(&p, i, 0) < bound);
    }
    /* All who were asked to wait for some seconds would come back at once. */
    uint64_t least = UINT64_MAX, most = 0;
    for (int i = 0; i < 20; i++) {
        uint64_t pause = s3_pause_ns(&p, 1, 3);
        least = pause < least ? pause : least;
        most = pause > most ? pause : most;
    }
    assert_true(least >= UINT64_C(3000000000) && most < UINT64_C(3100000000) && least < most);
    assert_true(s3_pause_ns(&p, 1, UINT64_MAX) < UINT64_C(20100000000));
}

static void test_messages(void **state) {
    (void)state;
    s3_place p = {.host = (char *)"host", .region = (char *)"us-east-1"};
    strcpy(p.address.bucket, "bucket");
    s3_request r = {.what = "read it", .key = (char *)"a/b", .status = 301, .attempts = 1};
    ckd_error err = {0};
    strcpy(r.problem.region, "eu-north-1");
    assert_int_equal(s3_fail(&p, &r, &err), CKD_E_INVALID);
    assert_non_null(strstr(err.message, "set AWS_REGION=eu-north-1"));
    assert_string_equal(err.file, "s3://bucket/a/b");
    r.problem = (s3_problem){"RequestTimeTooSkewed", "The difference is too large.", ""};
    r.status = 403;
    assert_int_equal(s3_fail(&p, &r, &err), CKD_E_IO);
    assert_non_null(strstr(
        err.message, "host answered 403 RequestTimeTooSkewed (The difference is too large.): the clocks"));
    r.problem = (s3_problem){0};
    r.status = 507;
    assert_int_equal(s3_fail(&p, &r, &err), CKD_E_NOSPACE);
    r.failure = CURLE_PEER_FAILED_VERIFICATION;
    assert_int_equal(s3_fail(&p, &r, &err), CKD_E_IO);
    assert_non_null(strstr(err.message, "AWS_CA_BUNDLE"));
}

/* ---- places ---- */

const s3_backend *ckd_s3_backend(void);

static void check_place(const char *address, const object_options *options, const char *url,
                        const char *region) {
    object_store store;
    ckd_error err = {0};
    assert_int_equal(ckd_s3_backend()->open(&store, address, options, &err), CKD_OK);
    const s3_place *p = store.place;
    assert_string_equal(p->url, url);
    assert_string_equal(p->region, region);
    store.functions->close(store.place);
}

static void test_places(void **state) {
    (void)state;
    static const char *const bad[] = {"ftp://h",
                                      "http://",
                                      "http:///b",
                                      "http://a/../b",
                                      "http://a//b",
                                      "http://a/%62",
                                      "http://user:topsecret@h",
                                      "https://h?x",
                                      "https://h/a?x"};
    object_options none = {0};
    setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent", 1);
    setenv("AWS_CONFIG_FILE", "/nonexistent", 1);
    setenv("AWS_ACCESS_KEY_ID", "a", 1);
    setenv("AWS_SECRET_ACCESS_KEY", "b", 1);
    static const char *const unset[] = {"AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL",
                                        "AWS_ENDPOINT_URL_S3", "AWS_PROFILE"};
    for (size_t i = 0; i < sizeof(unset) / sizeof(unset[0]); i++) {
        unsetenv(unset[i]);
    }
    check_place("s3://bucket/a", &none, "https://bucket.s3.us-east-1.amazonaws.com", "us-east-1");
    /* Names of hosts have no upper case: the bucket of another owner would be meant. */
    check_place("s3://Bucket/a", &none, "https://s3.us-east-1.amazonaws.com/Bucket", "us-east-1");
    check_place("s3://my_bucket/a", &none, "https://s3.us-east-1.amazonaws.com/my_bucket", "us-east-1");
    check_place("s3://bucket-/a", &none, "https://s3.us-east-1.amazonaws.com/bucket-", "us-east-1");
    object_options china = {.region = "cn-north-1"};
    check_place("s3://bucket", &china, "https://bucket.s3.cn-north-1.amazonaws.com.cn", "cn-north-1");
    object_options below = {.endpoint = "https://host:8/storage/v1/s3/"};
    check_place("s3://bucket/a", &below, "https://host:8/storage/v1/s3/bucket", "us-east-1");
    object_options virtual = {.endpoint = "https://host:8/a", .bucket_in_host = true};
    check_place("s3://bucket/a", &virtual, "https://bucket.host:8/a", "us-east-1");
    setenv("AWS_DEFAULT_REGION", "eu-west-1", 1);
    check_place("s3://my.bucket/a", &none, "https://s3.eu-west-1.amazonaws.com/my.bucket", "eu-west-1");
    setenv("AWS_REGION", "eu-north-1", 1);
    setenv("AWS_ENDPOINT_URL", "http://h:1/", 1);
    check_place("s3://bucket", &none, "http://h:1/bucket", "eu-north-1");
    setenv("AWS_ENDPOINT_URL_S3", "http://[::1]:2", 1);
    check_place("s3://bucket", &none, "http://[::1]:2/bucket", "eu-north-1");
    object_options own = {.endpoint = "https://own", .region = "here"};
    check_place("s3://bucket", &own, "https://own/bucket", "here");
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        object_store store;
        ckd_error err = {0};
        own.endpoint = bad[i];
        assert_int_equal(ckd_s3_backend()->open(&store, "s3://bucket", &own, &err), CKD_E_INVALID);
        assert_null(strstr(err.message, "topsecret"));
    }
    object_store store;
    assert_int_equal(ckd_s3_backend()->open(&store, "s3://Bucket", &virtual, NULL), CKD_E_INVALID);
}

/* Without its query, a request that removes an upload would remove the object. */
static void test_a_query_that_found_no_memory_is_not_sent(void **state) {
    (void)state;
    object_store store;
    object_options own = {.endpoint = "http://127.0.0.1:1"};
    assert_int_equal(ckd_s3_backend()->open(&store, "s3://bucket", &own, NULL), CKD_OK);
    CURL *easy = curl_easy_init();
    s3_request r;
    assert_int_equal(s3_request_make(&r, store.place, "DELETE", "key", NULL), CKD_OK);
    r.query.failed = true;
    assert_int_equal(s3_attempt_prepare(store.place, easy, &r, NULL), CKD_E_NOMEM);
    curl_easy_cleanup(easy);
    s3_request_free(&r);
    store.functions->close(store.place);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_addresses),
        cmocka_unit_test(test_queries_are_canonical),
        cmocka_unit_test(test_encoded_text),
        cmocka_unit_test(test_sizes_of_parts),
        cmocka_unit_test(test_hashes),
        cmocka_unit_test(test_listings),
        cmocka_unit_test(test_listings_that_are_refused),
        cmocka_unit_test(test_an_empty_element_is_refused),
        cmocka_unit_test(test_sizes_of_answers_are_bounded),
        cmocka_unit_test(test_problems),
        cmocka_unit_test(test_uploads),
        cmocka_unit_test(test_profiles),
        cmocka_unit_test(test_keys_are_of_one_file),
        cmocka_unit_test(test_keys_from_json),
        cmocka_unit_test(test_times),
        cmocka_unit_test(test_what_is_tried_again),
        cmocka_unit_test(test_messages),
        cmocka_unit_test(test_places),
        cmocka_unit_test(test_a_query_that_found_no_memory_is_not_sent),
    };
    return cmocka_run_group_tests_name("s3_parse", tests, NULL, NULL);
}
