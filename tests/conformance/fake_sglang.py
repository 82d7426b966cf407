class FakeSGLang: pass
